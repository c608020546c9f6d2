"""The command line's traces: files opened before anything is read, and written however a generation ends."""

from collections.abc import Iterator
from contextlib import contextmanager

from qwen_gdn.decode import HybridModel
from weights.files import one_line

from .arguments import UsageError
from .options import Options
from .prepare import Job
from .report import Meter
from .streams import say
from .trace import Recorder
from .trace.files import TraceFiles


def opened(options: Options) -> TraceFiles:
    """The files that a trace is asked for in, perhaps none; UsageError if one cannot be written."""
    try:
        return TraceFiles(options.trace)
    except (OSError, ValueError) as error:
        raise UsageError(f"--trace: {one_line(error)}") from None


def recorder_for(options: Options, job: Job, target: HybridModel, meter: Meter) -> Recorder | None:
    """A recorder of the run, if a trace is asked for."""
    if not options.trace:
        return None
    return Recorder(job.tokenizer, job.prompt_ids, meter, options.settings(target) | {"seed": options.seed})


@contextmanager
def recording(recorder: Recorder | None, files: TraceFiles) -> Iterator[None]:
    """Writes the trace of what its body generates, also if that raises; a trace that fails then is only told of."""
    try:
        yield
    except BaseException as error:
        if recorder is not None:
            try:
                files.write(recorder.trace(error=error))
            except OSError as another:
                say(f"ddtree: error: {one_line(another)}")
        raise
    if recorder is not None:
        files.write(recorder.trace())
