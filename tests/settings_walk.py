"""Every setting of the run file, with a value to change it to: what `train/test_every_setting.py` walks.

A line is named by the class of the settings model and the setting. It says what a run starts from, which one setting is
changed, and where what that changes is seen:

    run     lines of metrics without their times, and what the run came to
    calls   how pipelines, caches, threads and clocks were called: of what is only quicker or slower
    files   checkpoints and folders
    said    sentences and files
"""

from typing import Any, NamedTuple


class Walk(NamedTuple):
    """Settings to begin from, the change of one of them, and where what it changes is seen."""

    base: dict[str, Any]
    change: dict[str, Any]
    see: str = "run"


class Shown(NamedTuple):
    """A test elsewhere shows what the setting changes, as it takes several ranks or a module."""

    file: str
    test: str


def tables(optimizer: str, **changed: Any) -> Walk:
    """A setting of a table's optimizer."""
    base = {"tables.optimizer": {"name": optimizer, "lr": 0.05}}
    return Walk(base, {f"tables.optimizer.{name}": value for name, value in changed.items()})


def dense(optimizer: str, **changed: Any) -> Walk:
    """A setting of the dense part's optimizer."""
    base = {"optimizer": {"name": optimizer, "lr": 0.05}}
    return Walk(base, {f"optimizer.{name}": value for name, value in changed.items()})


def schedule(settings: dict[str, Any], **changed: Any) -> Walk:
    base = {"tables.optimizer": {"name": "sgd", "lr": 0.5, "schedule": settings}}
    return Walk(base, {f"tables.optimizer.schedule.{name}": value for name, value in changed.items()})


def model(settings: dict[str, Any], history: str = "mean", **changed: Any) -> Walk:
    base = {"model": settings, "features": {"history": {"pooling": history}}}
    return Walk(base, {f"model.{name}": value for name, value in changed.items()})


def steps(step: dict[str, Any], **changed: Any) -> Walk:
    return Walk({"data.steps": [step]}, {"data.steps": [{**step, **changed}]})


def cached(**changed: Any) -> Walk:
    base = {"cluster.cache": {"capacity": 60, "policy": "pinned"}}
    return Walk(base, {f"cluster.cache.{name}": value for name, value in changed.items()}, "calls")


def policy(settings: dict[str, Any], see: str = "calls", cluster: Any = None, **changed: Any) -> Walk:
    base = {"policy": settings, **({"cluster": cluster} if cluster else {})}
    return Walk(base, {f"policy.{name}": value for name, value in changed.items()}, see)


def follow(see: str = "run", base: Any = None, whole: Any = None, **changed: Any) -> Walk:
    whole = {"data.follow": {"path": "incoming", "idle": 0, **(base or {})}, "train.steps": 2, **(whole or {})}
    return Walk(whole, {f"data.follow.{name}": value for name, value in changed.items()}, see)


def planned(settings: dict[str, Any], see: str = "run", **changed: Any) -> Walk:
    return Walk({"plan": settings}, {f"plan.{name}": value for name, value in changed.items()}, see)


RETRIEVAL = "train/test_retrieval.py"


def retrieval(objective: str) -> dict[str, Walk | Shown]:
    """The settings that objectives for retrieval share."""
    tests = {
        "item": "test_the_item_is_the_feature_that_the_run_names",
        "item_features": "test_further_features_of_an_item_are_looked_up_with_what_is_drawn",
        "label": "test_positives_are_where_the_named_label_is_above_0",
        "temperature": "test_the_in_batch_loss_is_its_formula",
        "k": "test_a_two_tower_model_learns_to_find_items_and_is_measured_over_all",
        "exclude": "test_what_is_excluded_is_not_recommended_again",
        "logq": "test_without_logq_counts_do_not_matter",
    }
    return {f"{objective}.{setting}": Shown(RETRIEVAL, test) for setting, test in tests.items()}


ITEM = {"tables.item.dim": 4}
STOPPING = {"train.evaluate_every": 1, "train.early_stopping": {"patience": 1, "min_delta": 9.0}}
ROWS = {"name": "linear", "steps": 4}
BIASES = [{"parameters": "*bias", "lr": 0.2}]
TRANSFORMER = {"name": "transformer", "deep": [8], "layers": 1}
GRAPH = {"name": "graph", "width": 4, "deep": [4]}
NEAR = {"name": "neighbours", "graph": "clicks.graph", "fan_outs": [2]}
GRAPHS = {"data.steps": [NEAR], "model": GRAPH}
BUCKETS = {"name": "bucketise", "column": "price", "boundaries": [0.0]}

WALK: dict[str, Walk | Shown] = {
    "Run.features": Walk({}, {"features": {"history": {"pooling": "sum"}}}),
    "Run.model": Walk({}, {"model": {"name": "dcnv2", "deep": [8]}}),
    "Run.objective": Shown("train/test_own_classes.py", "test_an_objective_of_ones_own_is_trained_and_measured"),
    "BinarySettings.label": Shown("objectives/test_labels.py", "test_a_run_trains_on_the_label_that_it_names"),
    "Evaluate.slices": Shown("objectives/test_slices.py", "test_a_slice_has_the_metrics_of_its_samples_alone"),
    "Evaluate.values": Shown("objectives/test_slices.py", "test_rarer_values_are_together"),
    "Evaluate.metrics": Shown("objectives/test_own_metrics.py", "test_a_metric_of_ones_own_stands_beside_the_others"),
    "OwnMetric.name": Shown("objectives/test_own_metrics.py", "test_a_metric_of_ones_own_stands_beside_the_others"),
    "OwnMetric.folder": Shown("objectives/test_own_metrics.py", "test_a_metric_is_found_where_the_run_file_says"),
    "RegressionSettings.label": Shown("objectives/test_regression.py", "test_a_run_learns_a_label_that_is_any_number"),
    "RegressionSettings.loss": Shown("objectives/test_regression.py", "test_each_loss_trains_another_model"),
    "RegressionSettings.delta": Shown("objectives/test_regression.py", "test_each_loss_trains_another_model"),
    "MultiTaskSettings.tasks": Shown("objectives/test_multi_task.py", "test_weights_change_what_is_learned"),
    "Task.kind": Shown("objectives/test_multi_task.py", "test_without_tasks_every_label_is_one_of_its_own_kind"),
    "Task.weight": Shown("objectives/test_multi_task.py", "test_weights_change_what_is_learned"),
    "Task.loss": Shown("objectives/test_multi_task.py", "test_the_loss_is_the_weighted_sum_of_each_tasks_own"),
    "Task.delta": Shown("objectives/test_multi_task.py", "test_the_loss_is_the_weighted_sum_of_each_tasks_own"),
    **retrieval("InBatchSoftmaxSettings"),
    **retrieval("SampledSoftmaxSettings"),
    **retrieval("NextItemSettings"),
    "NextItemSettings.history": Shown(RETRIEVAL, "test_the_next_item_is_that_of_the_history_that_the_run_names"),
    "NextItemSettings.negatives": Shown(RETRIEVAL, "test_the_loss_of_drawn_next_items_is_its_formula"),
    "NextItemSettings.alpha": Shown(RETRIEVAL, "test_items_are_drawn_by_count_to_the_power_of_alpha"),
    "SampledSoftmaxSettings.negatives": Shown(RETRIEVAL, "test_the_sampled_loss_is_its_formula_and_repeats_its_draws"),
    "SampledSoftmaxSettings.alpha": Shown(RETRIEVAL, "test_items_are_drawn_by_count_to_the_power_of_alpha"),
    "OwnModel.name": Shown("train/test_own_classes.py", "test_a_model_of_ones_own_trains_by_its_name"),
    "OwnModel.folder": Shown("train/test_own_classes.py", "test_a_module_is_found_where_the_run_file_says"),
    "OwnObjective.name": Shown("train/test_own_classes.py", "test_an_objective_of_ones_own_is_trained_and_measured"),
    "OwnObjective.folder": Shown("train/test_own_classes.py", "test_a_module_is_found_where_the_run_file_says"),
    "OwnOptimizer.name": Shown("train/test_dense_optimizers.py", "test_any_optimizer_is_resumed_to_the_same_bits"),
    "OwnOptimizer.folder": Shown("train/test_dense_optimizers.py", "test_a_module_is_found_where_the_run_file_says"),
    "Run.optimizer": Walk({}, {"optimizer": {"name": "sgd"}}),
    "Run.policy": Walk({}, {"policy": {"name": "exact"}}, "calls"),
    "Run.plan": Walk({}, {"plan": {"memory": "6KiB"}}),
    "Data.path": Walk({}, {"data.path": "other"}),
    "Data.batch_size": Walk({}, {"data.batch_size": 100}),
    "Data.shuffle": Walk({}, {"data.shuffle": False}),
    "Data.seed": Walk({}, {"data.seed": 1}),
    "Data.train": Walk({}, {"data.train": "test"}),
    "Data.validation": Walk({"train.evaluate_every": 2}, {"data.validation": "train"}),
    "Data.test": Walk({}, {"data.test": "train"}),
    "Data.steps": Walk({}, {"data.steps": [{"name": "log", "columns": ["price"]}]}),
    "Data.follow": Walk({"train.steps": 2}, {"data.follow": {"path": "incoming", "idle": 0}}),
    "Hash.columns": steps({"name": "hash", "columns": ["item"], "buckets": 9}, columns=["user"]),
    "Hash.buckets": steps({"name": "hash", "columns": ["item"], "buckets": 9}, buckets=5),
    "Hash.salt": steps({"name": "hash", "columns": ["item"], "buckets": 9}, salt=1),
    "Truncate.columns": steps({"name": "truncate", "columns": ["history"], "length": 1}, columns=["user"]),
    "Truncate.length": steps({"name": "truncate", "columns": ["history"], "length": 1}, length=2),
    "Clip.columns": steps({"name": "clip", "columns": ["price"], "low": 0.0}, columns=["prize"]),
    "Clip.low": steps({"name": "clip", "columns": ["price"], "low": 0.0}, low=0.5),
    "Clip.high": steps({"name": "clip", "columns": ["price"], "low": 0.0}, high=0.5),
    "Log.columns": steps({"name": "log", "columns": ["price"]}, columns=["prize"]),
    "Normalise.columns": steps({"name": "normalise", "columns": ["price"], "mean": 0, "std": 2}, columns=["prize"]),
    "Normalise.mean": steps({"name": "normalise", "columns": ["price"], "mean": 0, "std": 2}, mean=1),
    "Normalise.std": steps({"name": "normalise", "columns": ["price"], "mean": 0, "std": 2}, std=3),
    "Function.columns": steps({"name": "function", "columns": ["price"], "function": "numpy:abs"}, columns=["item"]),
    "Function.function": steps(
        {"name": "function", "columns": ["price"], "function": "numpy:abs"}, function="numpy:sin"
    ),
    "Bucketise.column": steps(BUCKETS, column="prize"),
    "Bucketise.boundaries": steps(BUCKETS, boundaries=[1.0]),
    "Bucketise.feature": steps(BUCKETS, feature="cheap"),
    "Bucketise.table": steps(BUCKETS, table="item"),
    "Bucketise.keep": steps(BUCKETS, keep=True),
    "Neighbours.graph": Walk(GRAPHS, {"data.steps": [{**NEAR, "graph": "fewer.graph"}]}),
    "Neighbours.fan_outs": Walk(GRAPHS, {"data.steps": [{**NEAR, "fan_outs": [3]}]}),
    "Follow.path": follow(path="elsewhere"),
    "Follow.format": follow(format="criteo"),
    "Follow.columns": follow(columns="columns.toml"),
    "Follow.bad": follow(base={"path": "bad"}, bad="skip"),
    "Follow.evaluate_every": Shown(
        "objectives/test_progressive.py", "test_each_batch_is_scored_with_what_was_known_before_it"
    ),
    "Follow.look_every": follow("calls", {"idle": 0.01, "look_every": 0.002}, look_every=0.003),
    "Follow.idle": follow("calls", {"look_every": 0.002}, idle=0.01),
    "Follow.checkpoint_every": follow(
        base={"path": "two"}, whole={"data.batch_size": 50, "train.steps": 4}, checkpoint_every=0
    ),
    "Tables.dim": Walk({}, {"tables.dim": 8}),
    "Tables.dtype": Walk({}, {"tables.dtype": "bfloat16"}),
    "Tables.optimizer": Walk({}, {"tables.optimizer": {"name": "sgd"}}),
    "Tables.init": Walk({}, {"tables.init": {"name": "normal"}}),
    "Tables.admission": Walk({}, {"tables.admission": {"name": "count", "count": 2}}),
    "Tables.eviction": Walk({}, {"tables.eviction": {"ttl": 1}}),
    "TableSection.dim": Walk(ITEM, {"tables.item.dim": 8}),
    "TableSection.dtype": Walk(ITEM, {"tables.item.dtype": "bfloat16"}),
    "TableSection.optimizer": Walk(ITEM, {"tables.item.optimizer": {"name": "sgd"}}),
    "TableSection.init": Walk(ITEM, {"tables.item.init": {"name": "normal"}}),
    "TableSection.admission": Walk(ITEM, {"tables.item.admission": {"name": "count", "count": 2}}),
    "TableSection.eviction": Walk(ITEM, {"tables.item.eviction": {"ttl": 1}}),
    "TableSection.without": Walk({**ITEM, "tables.eviction": {"ttl": 1}}, {"tables.item.without": ["eviction"]}),
    "Uniform.scale": Walk({"tables.init": {"name": "uniform"}}, {"tables.init.scale": 0.5}),
    "Normal.std": Walk({"tables.init": {"name": "normal"}}, {"tables.init.std": 0.5}),
    "Fill.value": Walk({"tables.init": {"name": "fill"}}, {"tables.init.value": 0.5}),
    "ByCount.count": Walk({"tables.admission": {"name": "count", "count": 2}}, {"tables.admission.count": 3}),
    "ByCount.bytes": Walk({"tables.admission": {"name": "count", "count": 2}}, {"tables.admission.bytes": 4096}),
    "ByProbability.probability": Walk(
        {"tables.admission": {"name": "probability", "probability": 0.2}}, {"tables.admission.probability": 0.5}
    ),
    "Eviction.capacity": Walk({"tables.eviction": {"capacity": 20}}, {"tables.eviction.capacity": 30}),
    "Eviction.policy": Walk(
        {"tables.eviction": {"capacity": 150}, "data.batch_size": 50, "train.steps": 9},
        {"tables.eviction.policy": "lfu"},
    ),
    "Eviction.ttl": Walk({"tables.eviction": {"ttl": 1}}, {"tables.eviction.ttl": 2}),
    **{
        f"{name}.{setting}": tables(known, **{setting: value})
        for name, known in {
            "SGD": "sgd",
            "Momentum": "momentum",
            "Adagrad": "adagrad",
            "RowWiseAdagrad": "rowwise_adagrad",
            "Adam": "adam",
        }.items()
        for setting, value in {
            "lr": 0.1,
            "schedule": ROWS,
            "weight_decay": 0.5,
            "clip_value": 1e-5,
            "clip_norm": 1e-5,
            "bound": 0.01,
        }.items()
    },
    "Momentum.momentum": tables("momentum", momentum=0.5),
    "Momentum.dampening": tables("momentum", dampening=0.5),
    "Momentum.nesterov": tables("momentum", nesterov=True),
    "Adagrad.eps": tables("adagrad", eps=0.5),
    "Adagrad.initial": tables("adagrad", initial=0.5),
    "RowWiseAdagrad.eps": tables("rowwise_adagrad", eps=0.5),
    "RowWiseAdagrad.initial": tables("rowwise_adagrad", initial=0.5),
    "Adam.beta1": tables("adam", beta1=0.5),
    "Adam.beta2": tables("adam", beta2=0.5),
    "Adam.eps": tables("adam", eps=0.5),
    **{
        f"{name}.warmup": schedule(settings, warmup=3)
        for name, settings in {
            "Constant": {"name": "constant"},
            "Linear": ROWS,
            "Cosine": {"name": "cosine", "steps": 4},
            "StepDecay": {"name": "step", "every": 2},
            "InverseSqrt": {"name": "inverse_sqrt"},
        }.items()
    },
    "Linear.steps": schedule(ROWS, steps=2),
    "Linear.final": schedule(ROWS, final=0.5),
    "Cosine.steps": schedule({"name": "cosine", "steps": 4}, steps=2),
    "Cosine.final": schedule({"name": "cosine", "steps": 4}, final=0.5),
    "StepDecay.every": schedule({"name": "step", "every": 2}, every=1),
    "StepDecay.gamma": schedule({"name": "step", "every": 2}, gamma=0.5),
    "InverseSqrt.steps": schedule({"name": "inverse_sqrt"}, steps=3),
    "FeatureSection.dropout": Walk({"features.item.dropout": 0.0}, {"features.item.dropout": 0.5}),
    "FeatureSection.pooling": Walk({"features.history.pooling": "mean"}, {"features.history.pooling": "sum"}),
    "DLRMSettings.bottom": model({"name": "dlrm", "bottom": [8], "top": [8]}, bottom=[4]),
    "DLRMSettings.top": model({"name": "dlrm", "bottom": [8], "top": [8]}, top=[4]),
    "DCNv2Settings.layers": model({"name": "dcnv2", "deep": [8]}, layers=1),
    "DCNv2Settings.rank": model({"name": "dcnv2", "deep": [8]}, rank=2),
    "DCNv2Settings.deep": model({"name": "dcnv2", "deep": [8]}, deep=[4]),
    "DCNv2Settings.structure": model({"name": "dcnv2", "deep": [8]}, structure="stacked"),
    "DCNv2Settings.dropout": model({"name": "dcnv2", "deep": [8]}, dropout=0.5),
    "DeepFMSettings.deep": model({"name": "deepfm", "deep": [8]}, deep=[4]),
    "DeepFMSettings.dropout": model({"name": "deepfm", "deep": [8]}, dropout=0.5),
    "WideDeepSettings.deep": model({"name": "wide_deep", "deep": [8]}, deep=[4]),
    "WideDeepSettings.dropout": model({"name": "wide_deep", "deep": [8]}, dropout=0.5),
    "DINSettings.targets": model({"name": "din", "deep": [8]}, "sequence", targets={"history": "user"}),
    "DINSettings.attention": model({"name": "din", "deep": [8]}, "sequence", attention=4),
    "DINSettings.deep": model({"name": "din", "deep": [8]}, "sequence", deep=[4]),
    "DINSettings.activation": model({"name": "din", "deep": [8]}, "sequence", activation="prelu"),
    "TransformerSettings.targets": model(TRANSFORMER, "sequence", targets={"history": "user"}),
    "TransformerSettings.layers": model(TRANSFORMER, "sequence", layers=2),
    "TransformerSettings.heads": model(TRANSFORMER, "sequence", heads=1),
    "TransformerSettings.width": model(TRANSFORMER, "sequence", width=8),
    "TransformerSettings.feedforward": model(TRANSFORMER, "sequence", feedforward=2),
    "TransformerSettings.length": model(TRANSFORMER, "sequence", length=1),
    "TransformerSettings.dropout": model(TRANSFORMER, "sequence", dropout=0.5),
    "TransformerSettings.deep": model(TRANSFORMER, "sequence", deep=[4]),
    "GraphSettings.between": Walk(GRAPHS, {"model.between": ["item", "user"]}),
    "GraphSettings.width": Walk(GRAPHS, {"model.width": 8}),
    "GraphSettings.deep": Walk(GRAPHS, {"model.deep": [8]}),
    "GraphSettings.dropout": Walk(GRAPHS, {"model.dropout": 0.5}),
    **{
        f"{name}.{setting}": dense(known, **{setting: value})
        for name, known in {
            "DenseSGD": "sgd",
            "DenseMomentum": "momentum",
            "DenseAdagrad": "adagrad",
            "DenseAdam": "adam",
            "DenseAdamW": "adamw",
        }.items()
        for setting, value in {
            "lr": 0.1,
            "schedule": ROWS,
            "weight_decay": 0.5,
            "clip_norm": 1e-5,
            "groups": BIASES,
        }.items()
    },
    **{
        f"OwnOptimizer.{setting}": dense("torch.optim:RAdam", **{setting: value})
        for setting, value in {"lr": 0.1, "schedule": ROWS, "clip_norm": 1e-5, "groups": BIASES}.items()
    },
    **{
        f"Group.{setting}": Walk(
            {"optimizer": {"groups": BIASES}}, {"optimizer.groups": [{**BIASES[0], setting: value}]}
        )
        for setting, value in {"parameters": "*weight", "lr": 0.5, "weight_decay": 0.5, "frozen": True}.items()
    },
    "DenseMomentum.momentum": dense("momentum", momentum=0.5),
    "DenseMomentum.nesterov": dense("momentum", nesterov=True),
    "DenseAdagrad.eps": dense("adagrad", eps=0.5),
    "DenseAdagrad.initial": dense("adagrad", initial=0.5),
    **{
        f"{name}.{setting}": dense(known, **{setting: 0.5})
        for name, known in {"DenseAdam": "adam", "DenseAdamW": "adamw"}.items()
        for setting in ("beta1", "beta2", "eps")
    },
    "Sync.ahead": policy({"name": "sync"}, ahead=2),
    "Exact.ahead": policy({"name": "exact"}, ahead=3),
    "Hybrid.staleness": policy({"name": "hybrid", "worst": True, "ramp": 0}, "run", staleness=2),
    "Hybrid.ramp": policy({"name": "hybrid", "worst": True, "ramp": 0}, "run", ramp=100),
    "Hybrid.ahead": policy({"name": "hybrid"}, ahead=2),
    "Hybrid.worst": policy({"name": "hybrid"}, worst=True),
    "Bounded.clock": policy({"name": "bounded"}, cluster={"cache": {}}, clock=5),
    "Bounded.ahead": policy({"name": "bounded"}, cluster={"cache": {}}, ahead=5),
    "Train.epochs": Walk({"train.steps": 99, "data.batch_size": 500}, {"train.epochs": 2}),
    "Train.steps": Walk({}, {"train.steps": 2}),
    "Train.warm_start": Shown("train/test_warm_start.py", "test_a_run_begins_with_what_another_came_to"),
    "Train.accumulate": Walk({}, {"train.accumulate": 2}),
    "Train.evaluate_every": Walk({}, {"train.evaluate_every": 2}),
    "Train.checkpoint_every": Walk({"train.keep": 9}, {"train.checkpoint_every": 1}, "files"),
    "Train.keep": Walk({"train.checkpoint_every": 1}, {"train.keep": 1}, "files"),
    "Train.incremental": Walk({"train.checkpoint_every": 1}, {"train.incremental": 9}, "files"),
    "Train.log_every": Walk({}, {"train.log_every": 2}),
    "Train.early_stopping": Walk({"train.evaluate_every": 1}, STOPPING),
    "Train.device": Walk({}, {"train.device": "cuda"}),
    "Train.precision": Walk({}, {"train.precision": "bf16"}),
    "Train.compile": Walk({}, {"train.compile": True}, "calls"),
    "Train.threads": Walk({}, {"train.threads": 2}, "calls"),
    "Train.seed": Walk({}, {"train.seed": 1}),
    "EarlyStopping.metric": Walk(STOPPING, {"train.early_stopping.metric": "log_loss"}, "files"),
    "EarlyStopping.patience": Walk(STOPPING, {"train.early_stopping.patience": 2}),
    "EarlyStopping.min_delta": Walk(
        {**STOPPING, "train.early_stopping.metric": "log_loss"}, {"train.early_stopping.min_delta": 0.0}
    ),
    "PlanSection.path": planned({"path": "some.plan"}, path="other.plan"),
    "PlanSection.memory": planned({"memory": "6KiB"}, memory="8KiB"),
    "PlanSection.mode": planned({"memory": "6KiB"}, mode="hot_cold"),
    "PlanSection.replan_every": planned({"memory": "6KiB"}, replan_every=2),
    "PlanSection.judge": Walk(
        {"plan": {"memory": "6KiB", "mode": "hot_cold"}, "data.batch_size": 50}, {"plan.judge": 10}
    ),
    "PlanSection.device_rows": planned({"path": "some.plan"}, device_rows=True),
    "Cluster.shards": Walk({}, {"cluster.shards": ["a shard"]}),
    "Cluster.rows": Walk({}, {"cluster.rows": "replicated"}),
    "Cluster.wire": Shown("train/test_ranks.py", "test_rows_of_ranks_travel_as_the_run_says"),
    "Cluster.exchange": Walk({}, {"cluster.exchange": "nccl"}),
    "Cluster.key": Walk({"cluster.shards": ["a shard"]}, {"cluster.key": "nowhere.key"}),
    "Cluster.timeout": Shown("train/test_ranks.py", "test_ranks_wait_for_each_other_as_long_as_the_run_says"),
    "Cluster.cache": Walk({}, {"cluster.cache": {}}),
    "Cache.capacity": cached(capacity=80),
    "Cache.policy": cached(policy="lru"),
    "Cache.popular": cached(popular=2),
    "Cache.clock": cached(clock=3),
    "Cache.drift": Shown("train/test_ranks.py", "test_drift_and_sample_of_a_cache_are_those_of_the_run"),
    "Cache.ahead": cached(ahead=4),
    "Cache.sample": Shown("train/test_ranks.py", "test_drift_and_sample_of_a_cache_are_those_of_the_run"),
    "Output.folder": Walk({}, {"output.folder": "another"}, "files"),
    "Output.tensorboard": Walk({}, {"output.tensorboard": True}, "said"),
}
