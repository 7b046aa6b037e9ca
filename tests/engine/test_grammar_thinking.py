"""When a grammar begins: after the reasoning of a model that thinks, else at the first token."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engine.grammar_constraint import GrammarFailed
from paceline.engine.grammars import Grammars
from paceline.text.tokenizer import Tokenizer
from tests.engine.grammar_driving import EOS, allowed, grammars_of, params, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return grammars_of(tokenizer)


@pytest.mark.parametrize("cut", range(9))
def test_a_grammar_begins_after_a_marker_at_any_index_of_a_window(
    grammars: Grammars, tokenizer: Tokenizer, cut: int
) -> None:
    marker = [40, 41, 40]
    asked = params(choice=["ab"], after_token_ids=marker)
    output = [40, 41, 41, 40, 41, 40, *tokenizer.encode("ab"), EOS]
    constraint = grammars.constraint(asked)
    constraint.accept(output[:cut])
    rows = [allowed(row) for row in constraint.masks(output[cut:])]
    everything = allowed(np.full_like(constraint.masks([])[0], -1))
    inside = grammars.constraint(params(choice=["ab"])).masks(output[6:])
    expected = [everything] * 6 + [allowed(row) for row in inside]
    assert rows == expected[cut:]
    assert bool(constraint.forced()) is (6 <= cut < len(output))


@pytest.mark.parametrize("cut", range(8))
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("marker", ["<", "a!"])
def test_a_grammar_holds_at_once_unless_the_output_begins_with_a_marker(
    grammars: Grammars, tokenizer: Tokenizer, marker: str, thinks: bool, cut: int
) -> None:
    """Of the marker `a!` the grammar allows the first token too."""
    answer = [*tokenizer.encode("ab"), EOS]
    opening = tokenizer.encode(marker)
    masks = [allowed(row) for row in grammars.constraint(params(choice=["ab"])).masks(answer)]
    everything = allowed(np.full_like(grammars.constraint(params(regex="a")).masks([])[0], -1))
    begins = [sorted({*masks[0], opening[0]})]
    if len(opening) == 2:
        begins.append(sorted({*masks[1], opening[1]}))
    output, expected = answer, [*begins, *masks[len(begins) :]]
    if thinks:
        output = [*opening, 50, 60, *answer]
        expected = [*begins, everything, everything, *masks]
    constraint = grammars.constraint(
        params(choice=["ab"], after_token_ids=[60], opening_token_ids=opening)
    )
    assert constraint.forced() == [], "there are two choices"
    constraint.accept(output[:cut])
    rows = [allowed(row) for row in constraint.masks(output[cut:])]
    assert rows[0] == expected[min(cut, len(output))]
    assert rows == expected[cut:] or cut > len(output)
    is_under_the_grammar = len(output) > cut >= (len(output) - len(answer) if thinks else 1)
    assert bool(constraint.forced()) is (is_under_the_grammar and cut >= len(begins))


def test_a_begun_marker_that_the_grammar_forbids_must_be_ended(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    marker = tokenizer.encode("<!>")
    asked = params(choice=["ab"], after_token_ids=[60], opening_token_ids=marker)
    constraint = grammars.constraint(asked)
    constraint.accept(marker[:1])
    assert allowed(constraint.masks(tokenizer.encode("a"))[0]) == [marker[1]]
    with pytest.raises(GrammarFailed, match="marker"):
        constraint.accept(tokenizer.encode("a"))
