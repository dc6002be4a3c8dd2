"""A model of another family is refused for its family, whatever else there is to say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenspeed.config import ModelConfig
from tokenspeed.models import MODELS
from tokenspeed.text.architectures import ARCHITECTURES
from tokenspeed.text.errors import ModelError
from tokenspeed.text.text_side import load_text_side


def test_the_names_are_those_of_the_families() -> None:
    assert tuple(MODELS) == ARCHITECTURES


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], ["A", "B\n"], "Mamba", [], None, 3])
def test_the_family_is_refused_before_the_tokenizer_is_looked_for(
    tmp_path: Path, names: object
) -> None:
    """The folder has neither tokenizer nor chat template; both would be complaints of their own."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    with pytest.raises(ModelError, match="is not supported") as error:
        load_text_side(ModelConfig(model=str(tmp_path), chat_template="/no/such/template"))
    said = str(error.value)
    assert said.startswith("config.json: the model family ") and "\n" not in said
    assert f"(supported: {', '.join(ARCHITECTURES)}); give a model of one" in said
    if isinstance(names, list) and names:
        assert names[0] in said
