"""TorchRec's configs as Hotrow's settings: what a config asks for is done or refused, never passed over."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from torch import nn
from torchrec import DataType, PoolingType

from hotrow.errors import SettingsError
from hotrow.settings import parse
from hotrow.store.optimizers import Optimizer
from hotrow.table import Feature, Fill, Init, Normal, Table, Uniform

_DTYPES = {DataType.FP32: "float32", DataType.BF16: "bfloat16"}
_POOLINGS = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}

# With `use_virtual_table`: a Hotrow table is what TorchRec calls a virtual one, asked for or not.
_USED = {
    "num_embeddings",
    "embedding_dim",
    "name",
    "data_type",
    "feature_names",
    "weight_init_max",
    "weight_init_min",
    "init_fn",
    "use_virtual_table",
    "pooling",
}


def checked(config: Any, config_type: Any) -> Any:
    """The config with its feature names spelled out; refuses what it asks for that Hotrow does not do."""
    if not isinstance(config, config_type):
        raise SettingsError(f"A table must be given as {config_type.__name__}, not {type(config).__name__}.")
    where = f"Table {config.name}"
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        if field.name not in _USED and given != field.default:
            raise SettingsError(f"{where}: {field.name}={given!r} is not supported; leave it at {field.default!r}.")
    if config.data_type not in _DTYPES:
        raise SettingsError(f"{where}: data_type {config.data_type} is not supported; rows are FP32 or BF16.")
    if config.num_embeddings < 1:
        raise SettingsError(f"{where}: num_embeddings must be at least 1, not {config.num_embeddings}.")
    names = list(config.feature_names) or [config.name]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise SettingsError(f"{where}: feature {twice[0]} is given twice; a table gives a feature one output.")
    return dataclasses.replace(config, feature_names=names)


def table(config: Any, optimizer: Optimizer | None) -> Table:
    """The table of a checked config, with Hotrow's default optimizer if none is given."""
    settings = {
        "name": config.name,
        "dim": config.embedding_dim,
        "dtype": _DTYPES[config.data_type],
        "init": _init(config),
    }
    return parse(Table, settings if optimizer is None else settings | {"optimizer": optimizer}, f"Table {config.name}")


def feature(config: Any, name: str) -> Feature:
    """A feature of the config's table: pooled as it says, or a sequence where it says nothing of pooling."""
    pooling = getattr(config, "pooling", None)
    if pooling is not None and pooling not in _POOLINGS:
        raise SettingsError(
            f"Table {config.name}: pooling {pooling.value} is not possible here; use SUM or MEAN, "
            f"or an EmbeddingCollection for the rows one by one."
        )
    return parse(
        Feature,
        {"name": name, "table": config.name, "pooling": _POOLINGS.get(pooling, "sequence")},
        f"Table {config.name}",
    )


def _init(config: Any) -> Init:
    """What new rows start from: one value, normal around 0, or uniform and symmetric (TorchRec's default)."""
    given = config.init_fn
    if given is None:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        given = functools.partial(nn.init.uniform_, a=low, b=high)
    fn = given if isinstance(given, functools.partial) else functools.partial(given)
    if fn.func in (nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.zeros_, nn.init.ones_):
        bound = inspect.signature(fn.func).bind(None, *fn.args, **fn.keywords)
        bound.apply_defaults()
        match fn.func.__name__, bound.arguments:
            case "zeros_", _:
                return Fill(value=0.0)
            case "ones_", _:
                return Fill(value=1.0)
            case "constant_", {"val": value}:
                return Fill(value=value)
            case "uniform_", {"a": low, "b": high} if low == high:
                return Fill(value=low)
            case "uniform_", {"a": low, "b": high, "generator": None} if low == -high < 0:
                return Uniform(scale=high)
            case "normal_", {"mean": 0, "std": std, "generator": None} if std > 0:
                return Normal(std=std)
    raise SettingsError(
        f"Table {config.name}: rows cannot start from {_shown(fn)}. A row starts from its key alone: uniform "
        f"between -x and x (weight_init_min and weight_init_max), normal around 0, or one value, each by a "
        f"function of torch.nn.init without a generator. Other weights come in with load_state_dict."
    )


def _shown(fn: functools.partial[Any]) -> str:
    arguments = [*map(repr, fn.args), *(f"{name}={value!r}" for name, value in fn.keywords.items())]
    return f"{getattr(fn.func, '__name__', fn.func)}({', '.join(arguments)})"
