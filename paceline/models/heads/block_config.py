"""config.json of heads on DFlash's layers: z-lab's format and speculators'.

Where the two disagree with what runs them elsewhere, the code that trains heads decides; see
docs/howto/speculation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline.errors import CheckpointError
from paceline.kernels.step_rows import BlockLayout
from paceline.models.config_json import Config, flag_of, value_of
from paceline.models.families import FAMILIES
from paceline.models.spec import ModelSpec

MOST_QUERIES = 16  # of a block whose entries see each other (kernels/attention)
_REFUSED = {
    "lilicorr": "LiLiCorr",
    "laguna": "Laguna",
    "domino": "Domino",
    "pard2": "PARD2",
    "medusa": "Medusa",
    "mlp_speculator": "MLP speculator",
    "mlpspeculator": "MLP speculator",
}
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


class LayerKind(NamedTuple):
    """What the entries of a block see in a layer."""

    window: int | None
    is_causal: bool
    has_row_window: bool = False  # the window is that of the block's first entry


def refuse_by_name(name: str, config: Config) -> None:
    """Heads of kinds that are known, and not supported."""
    marks = [config.get(x) for x in ("architectures", "model_type", "speculators_model_type")]
    nested = config.get("dflash_config") or {}
    marks += [x.get(key) for x in (config, nested) for key in ("projector_type", "spd_type")]
    marks += [key for x in (config, nested) for key in x if key.startswith(("lilicorr_", "pard2_"))]
    text = str(marks).lower()
    found = next((title for mark, title in _REFUSED.items() if mark in text), None)
    if found is not None:
        raise CheckpointError(
            f"{name!r} is a {found} head, which is not supported; Paceline runs DFlash, DFlash2, "
            "DSpark, EAGLE, EAGLE-3, P-EAGLE and MTP heads, PARD and other draft models."
        )


def is_dspark(config: Config) -> bool:
    nested = config.get("dflash_config") or {}
    named = str((config.get("speculators_model_type"), config.get("architectures"))).lower()
    return "dspark" in named or any("markov_rank" in x for x in (config, nested))


def is_dflash(config: Config) -> bool:
    named = str((config.get("speculators_model_type"), config.get("architectures"))).lower()
    return not is_dspark(config) and ("dflash" in named or "dflash_config" in config)


def mask_id(name: str, configs: list[Config], num_rows: int) -> int:
    """The token that stands for what is to be drafted; `num_rows` are those of the embedding."""
    found = next((c[k] for c in configs for k in _MASK_KEYS if c.get(k) is not None), None)
    if type(found) is not int:
        keys = ", ".join(_MASK_KEYS)
        raise CheckpointError(f"{name!r}: config.json has no mask token ({keys}): found {found!r}.")
    if not 0 <= found < num_rows:
        raise CheckpointError(
            f"{name!r} has the mask token {found}, but the embedding has {num_rows} rows (0 to "
            f"{num_rows - 1}); the head belongs to another model."
        )
    return found


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The config of one head. Keys may be at its top or under `dflash_config`."""

    name: str
    top: Config

    @property
    def _inner(self) -> Config:
        return value_of(self.top, "dflash_config", dict, {})

    @property
    def is_nested(self) -> bool:
        """The format of speculators."""
        return "transformer_layer_config" in self.top

    @property
    def _layers(self) -> Config:
        return value_of(self.top, "transformer_layer_config", dict) if self.is_nested else self.top

    @property
    def title(self) -> str:
        if is_dspark(self.top):
            return "DSpark"
        return "DFlash2" if self.has_convs else "DFlash"

    @property
    def has_convs(self) -> bool:
        marks = (self.top.get("speculators_model_type"), self.top.get("architectures"))
        return "dflash2" in str(marks).lower() or self.key("conv_kernel_size") is not None

    def key(self, name: str) -> Any:
        return next((c[name] for c in (self._inner, self.top) if c.get(name) is not None), None)

    def number(self, name: str) -> int:
        return value_of({name: self.key(name)}, name, int)

    # ---- the layers

    def layers(self, target: ModelSpec) -> ModelSpec:
        """Always Qwen3's, whatever the target is."""
        values: dict[str, Any] = {"max_position_embeddings": target.max_position, **self._layers}
        values["use_sliding_window"] = False  # each layer has its own window
        for name in ("rope_scaling", "rope_parameters"):  # copied from targets with images
            if isinstance(values.get(name), Mapping):
                values[name] = {k: v for k, v in values[name].items() if k not in _NOT_TEXT}
        values = {k: v for k, v in values.items() if k not in _NOT_TEXT}
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if not values.get("rope_theta") and "rope_theta" not in rope:
            values["rope_theta"] = 1e6
        self._refuse_others(values)
        spec = FAMILIES["Qwen3ForCausalLM"](values)
        windows = [kind.window for kind in self.kinds()]
        reaches = [w for w in windows if w is not None]
        if spec.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"the {self.title} head {self.name!r} was made for a vocabulary of "
                f"{spec.vocab_size} tokens, the target has {target.vocab_size}."
            )
        return replace(
            spec,
            family=self.title.lower(),
            max_position=target.max_position,
            sliding_window=max(reaches) if len(reaches) == len(windows) else None,
        )

    def _refuse_others(self, values: Config) -> None:
        size = value_of(values, "head_dim", int, 0)
        others = {
            "is_neox_style": (self.key("is_neox_style") in (None, True)),
            "attention_value_scale": (self.key("attention_value_scale") in (None, 1, 1.0)),
            "attention_sink_bias": not self.key("attention_sink_bias"),
            "rope_dim": not size or self.key("rope_dim") in (None, size),
            "use_gemma_norm": not self.key("use_gemma_norm"),
        }
        for name, is_served in others.items():
            if not is_served:
                raise CheckpointError(
                    f"the {self.title} head {self.name!r} has {name} {self.key(name)!r}, which is "
                    "not supported."
                )

    def kinds(self) -> tuple[LayerKind, ...]:
        """Window and causality of each layer, in the order in which trainers decide them."""
        layers = self._layers
        count = value_of(layers, "num_hidden_layers", int)
        types = value_of(layers, "layer_types", list, ["full_attention"] * count)
        size = layers.get("sliding_window")
        if self.key("use_swa"):
            types, size = ["sliding_attention"] * count, self.number("swa_window_size")
        if len(types) != count:
            raise CheckpointError(
                f"{self.name!r}: config.json has {count} layers and {len(types)} layer_types."
            )
        stated = self.top.get("is_causal")
        stated = self._inner.get("causal") if stated is None else stated
        found = []
        for kind in types:
            is_sliding = kind == "sliding_attention"
            window = value_of({"sliding_window": size}, "sliding_window", int) if is_sliding else 0
            # speculators trains full layers in both directions, whatever the sliding ones do.
            is_causal = is_sliding if stated is None else bool(stated)
            if self.is_nested:
                is_causal = is_sliding and not flag_of(self.top, "sliding_window_non_causal")
            if self.is_nested and is_sliding:
                # Positions before the block's first entry, in training: it is not counted.
                found.append(LayerKind(window + 1, is_causal, has_row_window=True))
            else:
                found.append(LayerKind(window or None, is_causal))
        return tuple(found)

    # ---- what it reads and gives

    def target_size(self, target: ModelSpec) -> int:
        width = value_of(self._layers, "hidden_size", int)
        size = value_of(self.top, "target_hidden_size", int, width)
        if size != target.hidden_size:
            raise CheckpointError(
                f"the {self.title} head {self.name!r} reads hidden states of {size} numbers, the "
                f"target's have {target.hidden_size}; a head reads the target it was trained for."
            )
        return size

    def tap_ids(self, target: ModelSpec) -> tuple[int, ...]:
        """After how many layers the target is read. Only speculators counts so; others name the
        layer whose output it is."""
        num_layers = target.num_layers
        stated = value_of(self.top, "num_target_layers", int, num_layers)
        if stated != num_layers:
            raise CheckpointError(
                f"the {self.title} head {self.name!r} was made for a target of {stated} layers, "
                f"this one has {num_layers}."
            )
        listed, after = self.key("aux_hidden_state_layer_ids"), 0
        if listed is None:
            listed, after = self.key("target_layer_ids"), 1
        if listed is None:
            listed = _even_taps(value_of(self._layers, "num_hidden_layers", int), num_layers)
        if not listed or any(type(x) is not int or not 0 <= x + after < num_layers for x in listed):
            raise CheckpointError(
                f"the {self.title} head {self.name!r} reads the target's layers {listed}, but they "
                f"must lie between {-after} and {num_layers - 1 - after}: the target has "
                f"{num_layers} layers, and the last one's output cannot be read."
            )
        return tuple(x + after for x in listed)

    @property
    def draft_vocab_size(self) -> int:
        vocab_size = value_of(self._layers, "vocab_size", int)
        return value_of(self.top, "draft_vocab_size", int, vocab_size)

    def layout(self, k: int, target: ModelSpec, kinds: tuple[LayerKind, ...]) -> BlockLayout:
        """DSpark's anchor gives a draft unless the head says otherwise; DFlash's does not."""
        stated = self.key("sample_from_anchor")
        gives = is_dspark(self.top) if stated is None else bool(stated)
        mask = mask_id(self.name, [self._inner, self.top], target.vocab_size)
        found = BlockLayout(k, mask, first_output=0 if gives else 1)
        block_size = self.number("block_size")
        if found.width > block_size:
            raise CheckpointError(
                f"the {self.title} head {self.name!r} has blocks of {block_size} tokens, which "
                f"makes {block_size - found.first_output} drafts; num_speculative_tokens is {k}."
            )
        if found.width > MOST_QUERIES and any(not x.is_causal for x in kinds):
            most = MOST_QUERIES - found.first_output
            raise CheckpointError(
                f"num_speculative_tokens is {k}; a head whose entries see each other makes at most "
                f"{most} drafts here."
            )
        return found


_NOT_TEXT = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")


def _even_taps(count: int, num_layers: int) -> list[int]:
    """What heads read that do not say it: evenly from layer 1 to the third last."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
