"""What distinguishes one draft head from another, as data; read from the head's config.json.

Refuses, from the two configs alone, heads that cannot read their target.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from paceline.errors import CheckpointError
from paceline.models.spec import FAMILIES, Config, ModelSpec, refuse_quantised, value_of

logger = logging.getLogger(__name__)

TAPS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """An EAGLE-3 head: its layers, what it reads of the target, and where it has norms."""

    layers: ModelSpec
    target_size: int  # the target's hidden size
    draft_vocab_size: int
    tap_ids: tuple[int, ...]  # (): it reads the last hidden states, and has no fc
    norms_residual: bool  # the residual stream begins after hidden_norm, not before it
    norms_taps_together: bool = False
    norms_each_tap: bool = False
    norms_output: bool = False  # the next feature is what its lm_head reads


def is_eagle3(config: Config) -> bool:
    marks = (config.get("speculators_model_type"), config.get("architectures"))
    return "draft_vocab_size" in config or "eagle3" in str(marks).lower()


def read_eagle_spec(config: Config) -> ModelSpec:
    """The spec of an EAGLE-1 head: chosen by its role, for it calls itself a Llama or anything."""
    refuse_quantised(config)
    if is_eagle3(config):
        raise CheckpointError(
            'this is an EAGLE-3 head: give "method": "eagle3"; "eagle" takes EAGLE-1 heads.'
        )
    if "transformer_layer_config" in config:
        raise CheckpointError(
            "this is an EAGLE-1 head in the form of speculators "
            f"({config.get('speculators_model_type')!r}), which is not supported; use the head as "
            "it was published, or an EAGLE-3 head of either form."
        )
    return replace(_layers(config), family="eagle", has_first_norm=False)


def read_eagle3_spec(
    name: str, config: Config, target: ModelSpec, asked: tuple[int, ...] | None = None
) -> Eagle3Spec:
    """Both public formats: flat, and nested as `speculators` writes it. `asked` taps win."""
    refuse_quantised(config)
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise CheckpointError(f"speculators_model_type {kind!r} is not supported; 'eagle3' is.")
    nested = value_of(config, "transformer_layer_config", dict, {})
    layers = _layers(nested or config)
    if nested and "norm_before_residual" not in config:
        logger.warning(
            "%s: config.json does not say norm_before_residual; taking false. If drafts are "
            "poor, it was true",
            name,
        )
    uses_taps = value_of(config, "eagle_config", dict, {}).get("use_aux_hidden_state", True)
    spec = Eagle3Spec(
        layers=replace(layers, family="eagle3", max_position=target.max_position),
        target_size=value_of(config, "target_hidden_size", int, layers.hidden_size),
        draft_vocab_size=value_of(config, "draft_vocab_size", int, layers.vocab_size),
        tap_ids=_tap_ids(name, config, target.num_layers, asked) if uses_taps else (),
        norms_residual=bool(config.get("norm_before_residual", False)),
        norms_taps_together=bool(config.get("norm_before_fc", False)),
        norms_each_tap=bool(config.get("fc_norm", False)),
        norms_output=bool(config.get("norm_output", False)),
    )
    _check_sizes(name, spec, target)
    return spec


def _layers(config: Config) -> ModelSpec:
    # Heads state the length that they were trained with; it limits nothing.
    values = {"num_hidden_layers": 1, "max_position_embeddings": 2048, **config}
    is_qwen3 = config.get("model_type") == "qwen3"
    return FAMILIES["Qwen3ForCausalLM" if is_qwen3 else "LlamaForCausalLM"](values)


def _check_sizes(name: str, spec: Eagle3Spec, target: ModelSpec) -> None:
    if spec.target_size != target.hidden_size:
        raise CheckpointError(
            f"the EAGLE-3 head {name!r} reads hidden states of {spec.target_size} numbers, the "
            f"target's have {target.hidden_size}; a head reads the target it was trained for."
        )
    if not spec.tap_ids and spec.layers.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the EAGLE-3 head {name!r} reads the target's last hidden states as they are, but "
            f"its own have {spec.layers.hidden_size} numbers and the target's {target.hidden_size}."
        )
    if spec.layers.vocab_size != target.vocab_size:
        logger.warning(
            "the EAGLE-3 head %r was made for a vocabulary of %d tokens, the target has %d: it "
            "runs, but few of its drafts will be accepted",
            name,
            spec.layers.vocab_size,
            target.vocab_size,
        )


def _tap_ids(
    name: str, config: Config, num_layers: int, asked: tuple[int, ...] | None
) -> tuple[int, ...]:
    """After how many layers the head reads the residual stream."""
    places = (value_of(x, TAPS_KEY, list, []) for x in (config, config.get("eagle_config") or {}))
    listed = next((tuple(x) for x in places if x), None)
    if asked is not None:
        ids, why = asked, "asked for"
    elif listed is None:
        ids, why = (2, num_layers // 2, num_layers - 3), "the usual ones"
    elif listed == (1, num_layers // 2 - 1, num_layers - 4):
        # The usual ones, written by trainers that count a layer by its own number.
        ids, why = tuple(x + 1 for x in listed), f"listed as {list(listed)}"
    else:
        ids, why = listed, "listed in its config.json"
    if len({x for x in ids if type(x) is int and 0 <= x <= num_layers}) < len(ids):
        raise CheckpointError(
            f"the EAGLE-3 head {name!r} reads the target after layers {list(ids)} ({why}), but "
            f"they must be distinct and between 0 and the target's {num_layers}; give "
            f'"{TAPS_KEY}" in the speculative config if the head was trained with others.'
        )
    return ids


def read_mtp_spec(name: str, config: Config, target: ModelSpec) -> ModelSpec:
    """The target's own MTP layer, as a decoder of one layer. Never a dense one among experts."""
    key = "num_nextn_predict_layers"
    count = value_of(config, key, int, 0) or value_of(config, "num_mtp_layers", int, 0)
    if not count:
        raise CheckpointError(
            f"{name!r} has no MTP layer: its config.json says {key} {config.get(key)}; method "
            '"mtp" needs one, "eagle", "eagle3" and "draft_model" bring a "model", "ngram" neither.'
        )
    if count > 1:
        raise CheckpointError(
            f"{name!r} has {count} MTP layers ({key}), one for each draft; "
            "only checkpoints with a single one, which drafts again and again, are supported."
        )
    moe = None if target.moe is None else replace(target.moe, dense_layers=frozenset())
    return replace(target, num_layers=1, moe=moe)
