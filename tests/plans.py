"""Models of recipes as plans take them, and plans of them by name."""

import dataclasses

from configs import RECIPES
from trainer.planner import planning
from trainer.tasks import TASKS

# Names of models -> recipes.
OF_RECIPES = {
    **{x: x for x in ("gpt_3b", "gpt_7b", "dit_1b", "wan_1_3b", "wan_14b")},
    **{x: x for x in ("llama3_8b_1m", "qwen3_5_9b_1m", "gpt_oss_20b_128k")},
    **{x: x for x in ("moonlight_16b_128k", "kimi_linear_48b_1m")},
    # Without a length of their own.
    **{"llama3_8b": "llama3_8b", "llama3_70b": "llama3_70b", "qwen3_8b": "qwen3_8b_1m"},
    **{"qwen3_30b_a3b": "qwen3_30b_a3b_1m", "gpt_oss_20b": "gpt_oss_20b_128k"},
    "qwen3_5_9b": "qwen3_5_9b_1m",
}


def sizes(name):
    config = RECIPES[OF_RECIPES[name]]()
    found = TASKS[config.kind].sizes(config)
    given = name in ("llama3_8b", "llama3_70b") or name not in RECIPES
    return dataclasses.replace(found, name=name, **{"seq_len": None} if given else {})


MODELS = {name: sizes(name) for name in OF_RECIPES}


def plan(*, model, **options):
    """A plan of a model by its name, or by its sizes."""
    if isinstance(model, str):
        options, model = {"run": (OF_RECIPES[model],)} | options, MODELS[model]
    return planning.plan(model=model, **options)
