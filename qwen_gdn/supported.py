"""Which configs the model implements: family, architecture, and the keys whose other values mean other arithmetic."""

from collections.abc import Sequence

from .stated import Stated, shown

# Each with whether it has experts.
_MODEL_TYPES = {"qwen3_5": False, "qwen3_5_text": False, "qwen3_5_moe": True, "qwen3_5_moe_text": True}
_ARCHITECTURES = {
    "Qwen3_5ForConditionalGeneration": False,
    "Qwen3_5ForCausalLM": False,
    "Qwen3_5MoeForConditionalGeneration": True,
    "Qwen3_5MoeForCausalLM": True,
}
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
    "num_local_experts": (0, None),
}
_NEUTRAL_DENSE: dict[str, tuple[object, ...]] = {"num_experts": (0, None)}
# Every layer has experts, and their shares are renormalised.
_NEUTRAL_SPARSE: dict[str, tuple[object, ...]] = {
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "norm_topk_prob": (True, None),
    "n_group": (1, None),
    "routed_scaling_factor": (1, None),
}


def check_supported(root: Stated, text: Stated, text_keys: Sequence[str]) -> bool:
    """Checks a config's family, and that nothing in it asks for arithmetic that the model does not have.

    Args:
        root, text: the whole config and its text part; one and the same object if that is flat.
        text_keys: keys of the text part, which must not be contradicted where the root states them too.

    Returns:
        whether the model has experts.

    Raises:
        ValueError: it is another model's; the key is named.
    """
    sparse = _has_experts(root, text)
    for table in (root, text):
        table.refuse_others(_NEUTRAL | (_NEUTRAL_SPARSE if sparse else _NEUTRAL_DENSE))
    for key in text_keys if root is not text else ():
        outer, inner = root.table.get(key), text.table.get(key)
        if outer is not None and outer != inner:
            raise root.error(
                f"{key} is {shown(outer)} at the root, but {shown(inner)} in text_config; state it there alone"
            )
    return sparse


def _has_experts(root: Stated, text: Stated) -> bool:
    """Whether the family that the config names has experts; an error if it names none, another, or both kinds."""
    named = [("model_type", table.table.get("model_type")) for table in (text, root)]
    stated = [pair for pair in named if pair[1] is not None] or [("model_type", None)]
    stated += [("architectures", name) for table in (root, text) for name in table.maybe("architectures", list) or ()]
    found: dict[bool, str] = {}
    for key, name in stated:
        known = _MODEL_TYPES if key == "model_type" else _ARCHITECTURES
        if not isinstance(name, str) or name not in known:
            raise root.error(f"{key} {shown(name)} is not supported; supported are {', '.join(known)}")
        found.setdefault(known[name], f"{key} {name}")
    if len(found) > 1:
        raise root.error(f"{found[False]} is a dense model's, but {found[True]} one's with experts; correct one")
    return True in found
