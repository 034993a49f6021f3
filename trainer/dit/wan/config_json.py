"""What the config.json of a `WanTransformer3DModel` of diffusers says of a model. Imports no jax.

A key that a file leaves out has the default of the class. What is not supported here is refused,
and so is a key that is not known, as it might change the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_object
from trainer.dit.wan.config import MASK_CHANNELS, WanConfig

CONFIG, INDEX = "config.json", "model_index.json"
CLASS, TRANSFORMER = "WanTransformer3DModel", "transformer"
DEFAULTS: Mapping[str, Any] = {
    **{"patch_size": [1, 2, 2], "num_attention_heads": 40, "attention_head_dim": 128},
    **{"in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256},
    **{"ffn_dim": 13_824, "num_layers": 40, "cross_attn_norm": True, "eps": 1e-6},
    **{"qk_norm": "rms_norm_across_heads", "image_dim": None, "added_kv_proj_dim": None},
    **{"rope_max_seq_len": 1024, "pos_embed_seq_len": None},
}
"""Keys of the file, and what each is where it is left out (diffusers 0.42.1)."""
WHOLE = (
    *("num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim"),
    *("freq_dim", "ffn_dim", "num_layers"),
)
"""Keys whose values are whole numbers from 1 on."""
SAME: Mapping[str, str] = {
    **{"num_attention_heads": "heads", "out_channels": "channels", "text_dim": "text_dim"},
    **{"freq_dim": "time_channels", "ffn_dim": "mlp_width", "num_layers": "layers"},
    **{"cross_attn_norm": "text_norm", "image_dim": "image_dim"},
}
"""Keys whose values are fields of `WanConfig`."""
MOST = 1 << 20
"""No size of a model is so large."""


def folder_of(folder: Path) -> Path | None:
    """The folder with the config.json of a Wan, this one or its subfolder `transformer`, if any."""
    for place in (folder / TRANSFORMER, folder):
        path = place / CONFIG
        if path.is_file() and read_object(path).get("_class_name") == CLASS:
            return place
    return None


def is_of_diffusers(folder: Path) -> bool:
    """Whether a folder holds a model of diffusers, or of Wan as it was first published."""
    path = folder / CONFIG
    return (folder / INDEX).is_file() or (path.is_file() and "_class_name" in read_object(path))


def find_folder(folder: Path) -> Path:
    """As `folder_of`."""
    found = folder_of(folder)
    if found is None:
        raise InputError(
            f"init_from must be a folder of diffusers with {TRANSFORMER}/{CONFIG} of the class "
            f"{CLASS}, or that subfolder; got {str(folder)!r}. Download a model whose name ends in "
            "-Diffusers, or convert the original files with diffusers."
        )
    return found


def range_of(folder: Path) -> tuple[float, float]:
    """The times of a model: of two models of Wan 2.2, each has its own; else all."""
    place = find_folder(folder)
    index = place.parent / INDEX
    boundary = read_object(index).get("boundary_ratio") if index.is_file() else None
    if type(boundary) is not float or not 0 < boundary < 1:
        return 0.0, 1.0
    return (boundary, 1.0) if place.name == TRANSFORMER else (0.0, boundary)


def read_config(folder: Path) -> WanConfig:
    """The model of a folder."""
    path = find_folder(folder) / CONFIG
    return model_of(read_object(path), str(path))


def model_of(values: Mapping[str, Any], name: str) -> WanConfig:
    """The model that a config.json describes, with activations in bfloat16."""
    unknown = [key for key in values if key not in DEFAULTS and not key.startswith("_")]
    if unknown:
        raise UnsupportedError(
            f"The keys of {name} must be known, as they may change the model; got {unknown[0]!r}. "
            "Such models are not supported."
        )
    found = {**DEFAULTS, **{key: x for key, x in values.items() if not key.startswith("_")}}
    optional = [key for key in ("image_dim", "added_kv_proj_dim") if found[key] is not None]
    patch = found["patch_size"]
    sizes = {key: found[key] for key in (*WHOLE, *optional)}
    sizes |= {f"patch_size[{i}]": x for i, x in enumerate(patch if isinstance(patch, list) else [])}
    wrong = [key for key, x in sizes.items() if type(x) is not int or not 1 <= x < MOST]
    if wrong or len(sizes) != len(WHOLE) + len(optional) + 3:
        key = wrong[0] if wrong else "patch_size"
        raise InputError(
            f"{key} must be {'a whole number' if wrong else 'three whole numbers'} from 1 to "
            f"{MOST - 1} in {name}; got {sizes.get(key, patch)!r}. Download the file again."
        )
    width = found["num_attention_heads"] * found["attention_head_dim"]
    only = {
        "qk_norm": ("rms_norm_across_heads",),
        "pos_embed_seq_len": (None,),
        "added_kv_proj_dim": (width,) if found["image_dim"] else (None,),
        "cross_attn_norm": (True, False),
        "rope_max_seq_len": (1024,),
    }
    for key, allowed in only.items():
        if found[key] not in allowed:
            raise UnsupportedError(
                f"{key} must be {' or '.join(map(repr, allowed))}; got {found[key]!r} in {name}. "
                "Such models are not supported."
            )
    epsilon = found["eps"]
    if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
        raise InputError(f"eps must be from 0 to 1 in {name}; got {epsilon!r}. Correct the file.")
    channels, inputs = found["out_channels"], found["in_channels"]
    if inputs not in (channels, 2 * channels + MASK_CHANNELS):
        raise UnsupportedError(
            f"in_channels must be out_channels, or {2 * channels + MASK_CHANNELS} for models that "
            f"begin with an image; got in_channels={inputs}, out_channels={channels} in {name}. "
            "Such models are not supported."
        )
    return WanConfig(
        **{name: found[key] for key, name in SAME.items()},
        patch=(patch[0], patch[1], patch[2]),
        width=width,
        first_frame="none" if inputs == channels else "channels",
        norm_eps=float(epsilon),
        dtype="bfloat16",
    )


def to_values(model: WanConfig) -> dict[str, Any]:
    """The config.json of a model, as diffusers writes it."""
    return {
        "_class_name": CLASS,
        **DEFAULTS,
        **{key: getattr(model, name) for key, name in SAME.items()},
        "patch_size": list(model.patch),
        "attention_head_dim": model.head_dim,
        "in_channels": model.channels + model.given_channels,
        "eps": model.norm_eps,
        "added_kv_proj_dim": None if model.image_dim is None else model.width,
    }
