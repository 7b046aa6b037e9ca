"""The noise is the same everywhere, uniform, and independent between seeds and positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from paceline.kernels.rng import numpy as arrays
from paceline.kernels.rng import reference as rng
from paceline.kernels.table import uniform

DOMAINS = (rng.SAMPLE, rng.DRAFT, rng.ACCEPT, rng.RESAMPLE)


def some_keys(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    seeds = torch.randint(-(2**31), 2**31, (count, 2), generator=generator).to(torch.int32)
    positions = torch.randint(0, 2**31, (count,), generator=generator).to(torch.int32)
    return seeds, positions


def consecutive(count: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    seeds = torch.tensor([[seed, 0]], dtype=torch.int32).expand(count, 2)
    return seeds, torch.arange(count, dtype=torch.int32)


def bits_of(word: Tensor) -> np.ndarray:
    return word.numpy().view(np.uint32)


@pytest.mark.parametrize("domain", DOMAINS)
def test_numpy_shortcut_has_the_bits_of_the_tensor_reference(domain: int) -> None:
    seeds, positions = some_keys(64)
    key = rng.stream_keys(seeds, positions, domain)
    key_array = arrays.stream_keys(seeds.numpy(), positions.numpy(), domain)
    assert (bits_of(key) == key_array).all()
    words = rng.hash_words(key, torch.arange(777))
    array = arrays.hash_words(key_array[:, :1], key_array[:, 1:], arrays.token_words(777))
    assert (bits_of(words) == array).all()
    assert (rng.unit_interval(words).numpy() == arrays.unit_interval(array)).all()


def test_domain_per_row_equals_one_domain_for_all() -> None:
    seeds, positions = some_keys(8)
    domains = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0], dtype=torch.int32)
    keys = rng.stream_keys(seeds, positions, domains)
    keys_array = arrays.stream_keys(seeds.numpy(), positions.numpy(), domains.numpy())
    for row, domain in enumerate(domains.tolist()):
        alone = rng.stream_keys(seeds[row : row + 1], positions[row : row + 1], domain)
        assert torch.equal(keys[row], alone[0])
        assert (bits_of(alone)[0] == keys_array[row]).all()


def test_bits_never_change_so_that_a_seed_repeats_across_releases() -> None:
    seeds = torch.tensor([[1, 0], [-1, 12345]], dtype=torch.int32)
    positions = torch.tensor([0, 99], dtype=torch.int32)
    words = rng.hash_words(rng.stream_keys(seeds, positions, rng.SAMPLE), torch.tensor([0, 49151]))
    assert bits_of(words).tolist() == [[1810613278, 1123309215], [13118112, 3278968121]]


def test_unit_interval_keeps_small_values_and_never_reaches_one() -> None:
    words = torch.tensor([0, 1, 2, 1000, -(2**31), 2**31 - 1, -1], dtype=torch.int32)
    unit = rng.unit_interval(words).double()
    exact = torch.tensor([0.5, 1.5, 2.5, 1000.5, 2**31 + 0.5, 2**31 - 0.5, 2**32 - 0.5]) / 2**32
    assert torch.allclose(unit, exact.double(), rtol=2.5e-7, atol=0)
    assert unit.max() < 1
    assert torch.isfinite(torch.log1p(-unit.float())).all()


def test_uniform_equals_its_tensor_reference() -> None:
    key = (*some_keys(50), rng.ACCEPT)
    assert uniform.on(torch.device("cpu")) is arrays.uniform
    assert torch.equal(uniform(*key), rng.uniform(*key))


@pytest.mark.parametrize("domain", DOMAINS)
def test_consecutive_positions_give_uniform_numbers(domain: int) -> None:
    unit = uniform(*consecutive(400_000), domain).numpy()
    counts, _ = np.histogram(unit, bins=256, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-4


def test_consecutive_seeds_give_uniform_numbers() -> None:
    seeds = torch.zeros((400_000, 2), dtype=torch.int32)
    seeds[:, 0] = torch.arange(400_000)
    unit = uniform(seeds, torch.full((400_000,), 17, dtype=torch.int32), rng.SAMPLE).numpy()
    counts, _ = np.histogram(unit, bins=256, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize(("a", "b"), [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_domains_are_independent_at_equal_seeds_and_positions(a: int, b: int) -> None:
    keys = consecutive(300_000)
    cells = np.floor(uniform(*keys, a).numpy() * 16) * 16
    cells += np.floor(uniform(*keys, b).numpy() * 16)
    counts = np.bincount(cells.astype(np.int64), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_neighbouring_tokens_positions_and_seeds_are_independent() -> None:
    seeds, positions = consecutive(2000)
    here = rng.exponential(seeds, positions, rng.SAMPLE, 128)
    later = rng.exponential(seeds, positions + 1, rng.SAMPLE, 128)
    other = rng.exponential(seeds + torch.tensor([1, 0], dtype=torch.int32), positions, 0, 128)
    pairs = ((here[:, :-1], here[:, 1:]), (here, later), (here, other))
    for x, y in pairs:
        x, y = torch.exp(-x.flatten()), torch.exp(-y.flatten())
        cells = (x * 16).floor().clamp(max=15) * 16 + (y * 16).floor().clamp(max=15)
        counts = np.bincount(cells.long().numpy(), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.trap("E6")
def test_tail_of_the_exponential_is_right_at_one_in_a_hundred_thousand() -> None:
    # 16M draws: 160 are expected below 1e-5, and the smallest must be far below that.
    seeds, positions = consecutive(4000)
    noise = rng.exponential(seeds, positions, rng.SAMPLE, 4000)
    below = int((noise < 1e-5).sum())
    assert abs(below - 160) < 5 * 160**0.5
    assert 0 < float(noise.min()) < 1e-6
    assert len(noise[noise < 1e-5].unique()) == below  # no grid: small values keep their digits
    assert abs(float(noise.mean()) - 1) < 2e-3


def test_exponential_of_chosen_ids_equals_the_whole_row() -> None:
    seeds, positions = some_keys(6)
    whole = rng.exponential(seeds, positions, rng.DRAFT, 500)
    ids = torch.tensor([3, 499, 0, 77])
    assert torch.equal(rng.exponential(seeds, positions, rng.DRAFT, ids), whole[:, ids])
    per_row = torch.arange(6)[:, None] * 3 + torch.arange(2)
    assert torch.equal(
        rng.exponential(seeds, positions, rng.DRAFT, per_row), whole.gather(1, per_row)
    )


@pytest.mark.gpu
def test_bits_on_cuda_equal_those_on_cpu() -> None:
    seeds, positions = some_keys(64)
    key = rng.stream_keys(seeds, positions, rng.RESAMPLE)
    key_cuda = rng.stream_keys(seeds.cuda(), positions.cuda(), rng.RESAMPLE)
    tokens = torch.arange(5000)
    words = rng.hash_words(key_cuda, tokens.cuda()).cpu()
    assert torch.equal(words, rng.hash_words(key, tokens))
    assert torch.equal(rng.unit_interval(words.cuda()).cpu(), rng.unit_interval(words))
