"""`load_run`: the model that a run's folder holds."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from gated_attn.errors import RecipeError
from gated_attn.models.decoder import Decoder
from gated_attn.train.initialise import plan
from gated_attn.train.recipe import Recipe
from gated_attn.train.run import _trainer


def load_run(folder: str | Path) -> tuple[Decoder, Recipe]:
    """The decoder of a run's newest whole checkpoint, or of a checkpoint's own folder, in evaluation; and its recipe.

    Raises RecipeError for a folder that `gated-attn train` did not write, or that has no whole checkpoint.
    """
    folder = Path(folder)
    run = folder.parent if folder.name.startswith("checkpoint-") else folder
    try:
        values = json.loads((run / "config.json").read_text(encoding="utf-8"))
        gate, match = values.pop("gate"), values.pop("match")
        values.pop("seed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RecipeError(
            f"{folder} is not a run's folder: it has no config.json with a recipe and a gate; name what `gated-attn train` wrote"
        ) from None
    recipe = Recipe.from_dict(values)
    whole = [path for path in _trainer().checkpoints(run) if folder in (run, path)]
    if not whole:
        raise RecipeError(f"{folder} has no whole checkpoint; one is written every training.eval_every steps")
    model = Decoder(plan(recipe, gate, match).config)
    model.load_state_dict(load_file(whole[-1] / "model.safetensors"))
    return model.eval(), recipe
