"""Which configs the model implements: family, architecture, and the keys whose other values mean other arithmetic."""

from collections.abc import Sequence

from .stated import Stated, shown

_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
# Keys that would change the arithmetic if set to anything else.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attn_output_gate": (True, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}


def check_supported(root: Stated, text: Stated, text_keys: Sequence[str]) -> None:
    """Checks a config's family, and that nothing in it asks for arithmetic that the model does not have.

    Args:
        root, text: the whole config and its text part; one and the same object if that is flat.
        text_keys: keys of the text part, which must not be contradicted where the root states them too.

    Raises:
        ValueError: it is another model's; the key is named.
    """
    _check_family(root, text)
    for table in (root, text):
        table.refuse_quantised()
        table.refuse_others(_NEUTRAL)
    for key in text_keys if root is not text else ():
        outer, inner = root.table.get(key), text.table.get(key)
        if outer is not None and outer != inner:
            raise root.error(
                f"{key} is {shown(outer)} at the root, but {shown(inner)} in text_config; state it there alone"
            )


def _check_family(root: Stated, text: Stated) -> None:
    types = [t for table in (text, root) if (t := table.table.get("model_type")) is not None]
    for kind in types or [None]:
        if kind not in _MODEL_TYPES:
            raise root.error(f"model_type {shown(kind)} is not supported; supported are {', '.join(_MODEL_TYPES)}")
    for table in (root, text):
        names = table.maybe("architectures", list)
        for name in names or ():
            if name not in _ARCHITECTURES:
                raise root.error(
                    f"architectures {shown(name)} is not supported; supported are {', '.join(_ARCHITECTURES)}"
                )
