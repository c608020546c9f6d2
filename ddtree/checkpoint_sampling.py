"""The sampling that a checkpoint states in its generation_config.json. What cannot be followed is refused by name."""

from typing import Any

from weights.files import CONFIG_FILES, CheckpointError, read_json, resolve

from .arguments import UsageError
from .sampling import make_sampler

FILE = "generation_config.json"
_CUTS = ("top_k", "top_p", "min_p")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")

# Keys that act on what is written and are not obeyed here, with the values at which they do nothing, beside null.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "length_penalty": (0, 1),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "prompt_lookup_num_tokens": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False, True),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}

# Keys that have no part in how tokens are drawn: lengths and ids that are read elsewhere, and how others compute.
ELSEWHERE = {
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "eos_token_id",
    "is_assistant",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "return_dict_in_generate",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
    "use_mtp",
}


def checkpoint_sampling(target: str) -> dict[str, Any]:
    """Arguments of `make_sampler` that the target's generation_config.json states.

    As in transformers nothing is drawn at random unless `do_sample` is true: then the temperature is 0, and cuts are
    not taken. What the file leaves open has this library's defaults, but for a temperature of 1 where it is to be drawn
    from; transformers' own `top_k` of 50 is not assumed.

    Raises:
        UsageError: there is no such file.
        CheckpointError: it is damaged, a value is out of range, or it asks for something that is not done here.
    """
    file = resolve(target, "target", CONFIG_FILES) / FILE
    if not file.exists():
        raise UsageError(f"--sampling checkpoint: {target} has no {FILE}; leave it out and give the options you want")
    stated = {name: value for name, value in read_json(file).items() if value is not None}
    random = stated.pop("do_sample", False)
    if not isinstance(random, bool):
        raise CheckpointError(f"{file}: do_sample must be true or false, got {random!r}")
    known = {name: stated.pop(name) for name in ("temperature", *_CUTS, *_PENALTIES) if name in stated}
    for name, value in stated.items():
        if name not in ELSEWHERE and value not in NEUTRAL.get(name, ()):
            raise CheckpointError(f"{file}: {name} {value!r} is not done here; leave out --sampling checkpoint")
    try:
        make_sampler(**known)
    except ValueError as error:
        raise CheckpointError(f"{file}: {str(error).removeprefix('sampler: ')}") from None
    if random:
        return {"temperature": 1.0} | known
    return {"temperature": 0.0} | {name: value for name, value in known.items() if name in _PENALTIES}
