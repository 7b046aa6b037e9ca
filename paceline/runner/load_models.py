"""Models on this disk and how they are loaded, the same for every device. Never sizes a cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from paceline.checkpoint.source import ModelFiles, locate
from paceline.checkpoint.token_bytes import shared_tokens
from paceline.checkpoint.tokenizer_files import load_backend
from paceline.config import EngineConfig
from paceline.drafters.autoregressive import (
    AutoregressiveDrafter,
    DraftHead,
    DraftModelHead,
    FeatureHead,
)
from paceline.drafters.base import Drafter, NoDrafter
from paceline.drafters.block import BlockDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import CheckpointError, ConfigError
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.heads.base import BlockModel, HeadSpec, check_draft_model
from paceline.models.heads.registry import HEADS, pick_method, with_layers
from paceline.models.kv_scales import check_kv_scheme
from paceline.models.loading import expected_shapes, load_decoder
from paceline.models.quantised_config import fp8_scheme, method_of
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import DummyWeights, NamedShapes, WeightSource
from paceline.models.weights import open_weights
from paceline.option_values import ROUNDING
from paceline.parallel.groups import ALONE, Groups
from paceline.sampling.verify import conditional_rates, synthetic_rates
from paceline.speculation import SpeculativeConfig
from paceline.state.recurrent import LayerStorage

logger = logging.getLogger(__name__)
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Found:
    """A model on this disk, before its weights are read."""

    files: ModelFiles
    spec: ModelSpec
    head: HeadSpec | None = None  # None: a whole model
    method: str = ""  # of a draft
    is_draft: bool = False
    rounds_by: Literal["channel", "block"] | None = None  # see WeightFormats

    @property
    def is_fp8(self) -> bool:
        scheme = fp8_scheme(self.files.config)
        is_stored = scheme is not None and scheme.is_served_as_stored
        return self.rounds_by is not None or is_stored

    def local(self, groups: Groups) -> ModelSpec:
        """The sizes of one rank's part. Refuses, by name, a model that does not divide."""
        try:
            return self.spec.local(groups)
        except ConfigError as error:
            hint = ' Or give "draft_tensor_parallel_size": 1.' if self.is_draft else ""
            raise ConfigError(f"{self.files.name}: {error}{hint}") from None


def find_models(config: EngineConfig) -> list[Found]:
    """The target, and the draft where there is one."""
    model = config.model
    files = locate(model.model, revision=model.revision, load_format=model.load_format)
    with _about(files.name):
        rounds_by = _rounding(files, model.quantization, model.load_format)
        target = Found(files, read_spec(files.config), rounds_by=rounds_by)
    own = config.speculative.model if config.speculative else None
    with _about(own or files.name):
        draft = _find_draft(config, target)
    if config.cache.is_fp8:
        with _about(files.name):
            check_kv_scheme(files.config)
    return [target] if draft is None else [target, replace(draft, is_draft=True)]


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Where there are two checkpoints, an error says which of them is meant."""
    try:
        yield
    except CheckpointError as error:
        if name in str(error):
            raise
        raise CheckpointError(f"{name}: {error}") from None


def _find_draft(config: EngineConfig, target: Found) -> Found | None:
    speculative = config.speculative
    if speculative is None or speculative.method in ("ngram", "suffix"):
        return None
    method: str = speculative.method
    asked = speculative.quantization
    if method in HEADS and HEADS[method].is_in_target:
        name, files = target.files.name, target.files
        asked, load_format = asked or config.model.quantization, config.model.load_format
    else:
        assert speculative.model is not None, "the config requires a model for this method"
        name = speculative.model
        # A load format names the target's files; a draft may come in another one.
        load_format = "dummy" if config.model.load_format == "dummy" else "auto"
        files = locate(name, revision=speculative.revision, load_format=load_format)
        method = pick_method(name, files.config, speculative)
    if (files.folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{name!r} has a mask_embedding.pt, which replaces a row of the embedding; that is not "
            "supported. Use a head that stores its mask in embed_tokens."
        )
    rounds_by = _rounding(files, asked, load_format)
    window = speculative.draft_window_size
    if method in HEADS:
        head = HEADS[method].read(name, files.config, target.spec, speculative)
        if window is not None:
            head = with_layers(head, _windowed(name, head.layers, window))
        return Found(files, head.layers, head, method, rounds_by=rounds_by)
    spec = read_spec(files.config)
    if window is not None:
        spec = _windowed(name, spec, window)
    check_draft_model(name, spec, target.spec, may_differ=speculative.use_heterogeneous_vocab)
    return Found(files, spec, method=method, rounds_by=rounds_by)


def _windowed(name: str, spec: ModelSpec, window: int) -> ModelSpec:
    """Its layers see at most `window` positions."""
    if spec.attention.latent_size is not None or spec.recurrent is not None:
        raise ConfigError(
            f"draft_window_size: {name!r} has layers without a window (latent attention or "
            "recurrent state); leave it out."
        )
    return replace(spec, sliding_window=min(window, spec.sliding_window or window))


def _rounding(
    files: ModelFiles, asked: str | None, load_format: str
) -> Literal["channel", "block"] | None:
    """How weights are rounded while they are loaded. Refuses what the files contradict."""
    scheme = fp8_scheme(files.config)
    stored = "gguf" if files.kind == "gguf" else method_of(files.config)
    if asked in ROUNDING and stored is None:
        return ROUNDING[asked]
    if asked not in (None, stored) and (asked != "fp8" or scheme is None):
        raise CheckpointError(
            f'"quantization" is {asked!r}, but the files of {files.name!r} say {stored!r}; leave '
            "it out."
        )
    if load_format != "dummy" or scheme is None or not scheme.is_served_as_stored:
        return None
    return "channel" if scheme.block is None else "block"


def wanted_length(config: EngineConfig, found: list[Found]) -> tuple[int, bool]:
    """Positions that sequences may have, and whether the user set them."""
    longest = found[0].spec.max_position
    wanted = config.model.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {longest} positions that this model was "
            "made for; lower --max-model-len."
        )
    return wanted or longest, wanted is not None


def draft_max_len(config: EngineConfig, found: list[Found], max_model_len: int) -> int | None:
    """Tokens from which on a request gets no drafts; None: it always gets them.

    The draft's KV is written all the same, as far as the target's.
    """
    asked = config.speculative.max_model_len if config.speculative else None
    longest = min(asked or max_model_len, *(f.spec.max_position for f in found))
    return longest if longest < max_model_len else None


def kv_window(found: list[Found]) -> int | None:
    """How many positions up to a sequence's next one some layer may read; None: all of them."""
    windows = [f.spec.sliding_window for f in found]
    # A draft model begins one token before the target does.
    reaches = [w + (i > 0) for i, w in enumerate(windows) if w is not None]
    return max(reaches) if len(reaches) == len(windows) else None


FormatsOf = Callable[[Found], WeightFormats]


@dataclass(frozen=True, slots=True)
class Loader:
    """Reads weights in the formats of a device."""

    config: EngineConfig
    formats_of: FormatsOf
    progress: Progress
    groups: Groups = ALONE
    draft_groups: Groups = ALONE

    def decoder(self, found: Found, max_model_len: int) -> Decoder:
        return self._decoder(found, max_model_len, self.groups)

    def _decoder(self, found: Found, max_model_len: int, groups: Groups) -> Decoder:
        formats, spec = self.formats_of(found), found.spec
        with self._weights(found, expected_shapes(spec), formats.device) as weights:
            return load_decoder(
                spec,
                weights,
                formats,
                max_model_len=max_model_len,
                progress=self.progress,
                groups=groups,
            )

    def head(
        self, draft: Found, target: Decoder, layers: list[LayerStorage]
    ) -> DraftHead | BlockHead:
        """The model of a drafter that has one."""
        if draft.head is None:
            max_model_len = len(target.rotation)
            decoder = self._decoder(draft, max_model_len, self.draft_groups)
            speculative = self.config.speculative
            if speculative is None or not speculative.use_heterogeneous_vocab:
                return DraftModelHead(decoder, layers)
            return self._head_of_other_vocabulary(draft, decoder, layers, target.spec.vocab_size)
        self.progress("weights", 0.0)
        formats = self.formats_of(draft)
        shapes = draft.head.shapes(target.spec)
        with self._weights(draft, shapes, formats.device) as weights:
            model = draft.head.load(weights, formats, target, self.draft_groups)
        self.progress("weights", 1.0)
        if isinstance(model, BlockModel):
            return BlockHead(model, layers)
        return FeatureHead(model, layers)

    def _head_of_other_vocabulary(
        self, draft: Found, model: Decoder, layers: list[LayerStorage], vocab_size: int
    ) -> DraftModelHead:
        """A draft model, and which of its tokens are the target's, by the bytes of each."""
        options = self.config.model
        name = options.tokenizer or options.model
        revision = None if options.tokenizer else options.revision
        files = locate(name, revision=revision, with_weights=False)
        backends = [load_backend(f) for f in (files, draft.files)]
        pairs = list(shared_tokens(backends[0][0], backends[1][0]))
        limits = (vocab_size, model.spec.vocab_size)
        pairs = [(t, d) for t, d in pairs if t < limits[0] and d < limits[1]]
        if not pairs:
            raise CheckpointError(
                f"the draft model {draft.files.name!r} has no token of the target's vocabulary; "
                "use another draft."
            )
        logger.info("the draft has %d of the target's %d tokens", len(pairs), vocab_size)
        unknown = backends[1][1].named.get("unk_token")
        unknown_id = backends[1][0].token_to_id(unknown) if unknown else None
        return DraftModelHead.of_other_vocabulary(model, layers, pairs, unknown_id or 0, limits)

    @contextmanager
    def _weights(
        self, found: Found, shapes: NamedShapes, device: torch.device
    ) -> Iterator[WeightSource]:
        """The checkpoint's tensors, or random ones of the given shapes."""
        if self.config.model.load_format == "dummy":
            bias = float(found.files.config.get("dummy_router_bias", 10.0))
            yield DummyWeights(shapes, self.config.model.seed, device, bias)
            return
        with _about(found.files.name), closing(open_weights(found.files)) as weights:
            yield weights


class BlockHead(NamedTuple):
    """A model that drafts blocks, and where its KV is."""

    model: BlockModel
    layer_pages: list[LayerStorage]


def make_drafter(config: SpeculativeConfig | None, head: DraftHead | BlockHead | None) -> Drafter:
    if config is None or config.method == "suffix":
        return NoDrafter()
    k = config.num_speculative_tokens
    if head is None:
        return NgramDrafter(k, config.prompt_lookup_min, config.prompt_lookup_max)
    if isinstance(head, BlockHead):
        return BlockDrafter(*head, config.draft_sample_method)
    return AutoregressiveDrafter(head, k, config.draft_sample_method)


def forced_rates(config: SpeculativeConfig | None) -> tuple[float, ...] | None:
    """Chance of each draft, given those before it, under synthetic acceptance.

    None: drafts are verified.
    """
    if config is None or config.rejection_sample_method != "synthetic":
        return None
    rates = config.synthetic_acceptance_rates
    if rates is None:
        assert config.synthetic_acceptance_length is not None
        rates = synthetic_rates(config.synthetic_acceptance_length, config.num_speculative_tokens)
    return conditional_rates(rates)
