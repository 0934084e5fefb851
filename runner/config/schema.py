"""The one typed configuration of a run: defaults < YAML < environment < command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from checkpointing.extras import not_installed
from checkpointing.memory import parse_bytes
from checkpointing.tiers import DEFAULT_LOCAL_KEEP_LAST, Tiers, open_tiers
from runner.config import trainer_options
from runner.config.environment import settings_from_environment
from runner.errors import UsageError

# Files of training data, by suffix: the builder of `datasets` that reads them.
DATA_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
DEFAULT_CONFIG = Path(__file__).parents[1] / "training" / "data" / "default.yaml"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """Which model is fine-tuned."""

    name_or_path: str | None = None
    """Hub name or local folder. None builds a new SmolLM3 from `config`, with a tokenizer trained on the data; one of
    the two must be given."""
    config: dict[str, Any] = Field(default_factory=dict)
    """SmolLM3Config fields for the model built from scratch (or overrides for a loaded one)."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """auto: flash-attn where it is importable and the GPU supports it, else SDPA."""
    vocab_size: int = Field(default=2048, ge=300)
    """Vocabulary of the tokenizer trained for a model built from scratch."""


class MethodConfig(_Section):
    """What of the model is trained."""

    type: Literal["full", "lora", "qlora"] = "full"
    """full: every weight. lora: low-rank adapters (arXiv 2106.09685) on a frozen base; only they are saved. qlora: the
    same on a base in 4 bits (arXiv 2305.14314); needs a CUDA GPU and bitsandbytes."""
    r: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(default=32, ge=1)
    """Their output is scaled by alpha / r."""
    dropout: float = Field(default=0.05, ge=0, lt=1)
    """Before the adapters, in training."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get one; all-linear: every linear layer but the output."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Further modules that are trained whole, and saved with the adapters."""


Strategy = Literal["ddp", "fsdp"]


class DataConfig(_Section):
    """What it is fine-tuned on."""

    path: str | None = None
    """A .parquet, .jsonl, .json or .csv file, here or at a URL that fsspec knows, or a hub data set; with columns
    prompt and completion, or text, or messages. None: the bundled wilderness survival pairs."""
    split: str = "train"
    """Split of a hub data set."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Train on the first so many rows only, for a trial."""
    streaming: bool = False
    """Read rows while training goes on, instead of all of them before: for data that is larger than the disk. Needs
    `trainer.max_steps`."""
    shuffle_samples: Annotated[int, Field(ge=1)] | None = 10_000
    """How many rows of a stream are read ahead and brought into random order; None: the stream's own order."""
    validation_path: str | None = None
    """Likewise, for evaluations: `trainer.eval_strategy`, at every save if that is not set. `best_model` is the
    checkpoint with the least eval_loss then, or the best by `trainer.metric_for_best_model`. Saves that
    `checkpoint.save_steps: auto` or `save_minutes` choose are not evaluated."""
    validation_split: str | None = None
    """Split of a hub data set for evaluations, of `validation_path` or of `path`."""
    validation_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Or this share of the rows, drawn by `trainer.seed`."""

    @property
    def has_validation(self) -> bool:
        return any(value is not None for value in (self.validation_path, self.validation_split, self.validation_share))


class CheckpointConfig(_Section):
    """Where checkpoints go and how often; how many are kept is `trainer.save_total_limit`."""

    location: str | None = None
    """A directory, or a URL: file://, s3://bucket/prefix, or another of fsspec's. None: `output_dir`/checkpoints."""
    local_tier: str | None = None
    """A fast directory of this machine in front of `location`: checkpoints are committed there first, and copied to
    `location` in the background. It may be lost with the machine."""
    local_keep_last: Annotated[int, Field(ge=1)] = DEFAULT_LOCAL_KEEP_LAST
    """Newest checkpoints kept in `local_tier`."""
    keep_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Keep every checkpoint whose step is a multiple of this, besides the newest `trainer.save_total_limit` and the
    best by `trainer.metric_for_best_model`."""
    snapshot_steps: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """Steps between snapshots held in memory, from which a crashed attempt goes on. auto: as often as their measured
    price and the rate of failures make worth it. None: only those that are committed."""
    save_steps: Literal["auto"] | None = None
    """None: `trainer.save_steps` says when a snapshot is committed to storage. auto: chosen as above."""
    save_minutes: Annotated[float, Field(gt=0)] | None = None
    """And at least so often, in minutes."""
    overhead_cap: float = Field(default=0.01, gt=0, le=1)
    """Share of the run's time that auto may spend."""
    max_failed_saves: Annotated[int, Field(ge=1)] | None = 5
    """Saves in a row that storage may refuse before the run is stopped, so that no more is computed than can be kept;
    None: any number."""
    memory_limit: str | int | None = None
    """Memory that snapshots may take on each machine (8GiB); None: half of what is free. Two are held where that is
    enough, else one; with too little for one, every save blocks training until it is written."""

    @property
    def memory_limit_bytes(self) -> int | None:
        return parse_bytes(str(self.memory_limit)) if self.memory_limit is not None else None


def _torchruns_auto(value: Any) -> Any:
    """torchrun knows `gpu` and `cpu` besides `auto`; Kubeflow sets them."""
    return "auto" if value in ("gpu", "cpu") else value


class LaunchConfig(_Section):
    """Processes; torchrun's own names."""

    nproc_per_node: Annotated[Literal["auto"] | int, BeforeValidator(_torchruns_auto)] = "auto"
    """Ranks on this machine. auto: one per GPU, or 2 without GPUs."""
    nnodes: int = Field(default=1, ge=1)
    node_rank: int = Field(default=0, ge=0)
    """This machine's number. The RANK variable sets it, as in a PyTorchJob."""
    world_size: int | None = Field(default=None, ge=1)
    """All ranks of all machines (the WORLD_SIZE variable); sets nnodes where that is not given."""
    rdzv_endpoint: str | None = None
    """host:port where the machines meet. None: master_addr:master_port, or a free local port for one machine."""
    master_addr: str | None = None
    master_port: int = Field(default=29500, ge=1, le=65535)
    peer_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on the first machine where the runners of several machines talk. None: the rendezvous port + 1."""
    local_addr: str | None = None
    """Address or name of this machine that the others reach it by; None: its host name."""
    rendezvous_timeout_s: float = Field(default=600.0, gt=0)
    """How long a machine waits for the others, at the start and after one was lost."""
    cold: bool = False
    """Start every rank in a fresh interpreter instead of forking a preloaded one: for scripts that start CUDA or
    threads when imported."""

    @property
    def endpoint(self) -> str:
        """host:port of the rendezvous between machines."""
        return self.rdzv_endpoint or f"{self.master_addr or 'localhost'}:{self.master_port}"

    def rendezvous(self, nnodes: int) -> tuple[str, str | None]:
        """host:port where so many machines meet, and this one's name there; one machine needs neither."""
        # Nobody else is to reach a single one; nor may a pod's name resolve.
        own = "127.0.0.1" if nnodes == 1 else self.local_addr
        return self.endpoint if nnodes > 1 or self.rdzv_endpoint else "localhost:0", own

    @property
    def peer_address(self) -> tuple[str, int]:
        """Host and port of the first machine's runner.

        Raises:
            ValueError: the rendezvous endpoint names no port to count from.
        """
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdigit():
            host, port = self.endpoint.rstrip(":"), str(self.master_port)
        number = self.peer_port or int(port) + 1
        if not 0 < number < 65536:
            raise ValueError(f"port {number} of the runners' own connection is none; set launch.peer_port")
        return host.strip("[]"), number


def _yaml_off(value: Any) -> Any:
    """YAML reads an unquoted off as false."""
    return "off" if value is False else value


def _check_endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.port == 0:
        raise ValueError("write http://host:port")
    return value


class RestartConfig(_Section):
    """When to try again."""

    max_restarts: int = Field(default=5, ge=0)
    """Restarts without a newly committed checkpoint between them, before giving up."""
    max_network_retries: int = Field(default=20, ge=0)
    """Restarts after a rank failed because the network or a server did not answer (connection, time-out, DNS, HTTP 5xx
    and 429), without a newly committed checkpoint between them. They do not count against max_restarts."""
    backoff_initial_s: float = Field(default=1.0, ge=0)
    """Wait before the second restart without progress; the first one comes at once, each further one waits twice as
    long."""
    backoff_max_s: float = Field(default=60.0, ge=0)
    backoff_jitter_s: float = Field(default=1.0, ge=0)
    grace_s: float = Field(default=60.0, ge=0)
    """After a stop request, how long the ranks may take to snapshot and end."""
    hang_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """A step without end is a hang after this. None: 3 x the 99th percentile of this run's own steps + 5 s."""
    first_step_timeout_s: float = Field(default=1800.0, gt=0)
    """The same for the first steps of an attempt, and while torch.compile works."""
    quiet_timeout_s: float = Field(default=1800.0, gt=0)
    """The same for what is no step: start-up, restore, saving; and between two batches of an evaluation."""
    preemption_notices: Annotated[Literal["off", "aws", "gcp", "azure"], BeforeValidator(_yaml_off)] = "off"
    """The cloud whose metadata service is asked whether this machine is about to go; such a notice is a stop request.
    aws: spot interruption and rebalance recommendation; gcp: preemption and host maintenance that terminates; azure:
    scheduled Preempt, Terminate, Reboot and Redeploy."""
    metadata_endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = None
    """Where that service is, http://host:port. None: the cloud's own address, http://169.254.169.254."""


class GuardsConfig(_Section):
    """Steps of which nothing is kept: training goes on from the newest snapshot before them. Where such a step fails
    again, it is passed over from then on, with all steps since that snapshot."""

    check_finite: bool = True
    """Gradients that are infinite or NaN."""
    spike_zscore: Annotated[float, Field(gt=0)] | None = None
    """A loss this many robust standard deviations above the median of the last 64 steps; 8 is a good choice. None: do
    not look."""
    max_skipped_windows: int = Field(default=3, ge=0)
    """Windows of steps that one run may pass over; a further one ends it with 78."""


class TrackingConfig(_Section):
    """Experiment tracking beyond the Trainer's own report_to."""

    aim_repo: str | None = None
    """Aim repository (the AIM_REPO variable); needs the `aim` extra."""
    experiment: str = "wilderness-survival"


class MonitoringConfig(_Section):
    """Figures for Prometheus."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where the first machine's runner answers at /metrics (`--metrics-port`). None: nowhere."""
    address: str | None = None
    """Of this machine, that it answers at. None: 127.0.0.1 where the run has one machine (0.0.0.0 lets others scrape
    it), 0.0.0.0 where it has several."""


class CostConfig(_Section):
    """What the machines cost, for `runner report`."""

    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """Of one machine, on demand. None: the report says nothing of money."""
    spot_discount: float = Field(default=0.0, ge=0, lt=1)
    """Share of it that is not paid, as the machines may be taken away."""
    currency: str = "USD"


class Config(_Section):
    """A run."""

    output_dir: Annotated[str, Field(min_length=1, pattern=r"\S")] = "runs/default"
    """Folder of the run. Where it is not given: runs/NAME, by the name of the configuration file or the script."""
    scale_learning_rate: bool = True
    """Multiply trainer.learning_rate by the number of ranks."""
    strategy: Strategy = "ddp"
    """ddp: every rank holds the whole model. fsdp: parameters, gradients and optimizer state are sharded over the ranks
    of a machine, and replicated between machines (FSDP2); `trainer.fsdp_config` tunes it. Checkpoints are the same."""
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    data: DataConfig = DataConfig()
    trainer: dict[str, Any] = Field(default_factory=dict)
    """SFTConfig's own options, passed through."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    restart: RestartConfig = RestartConfig()
    guards: GuardsConfig = GuardsConfig()
    tracking: TrackingConfig = TrackingConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    cost: CostConfig = CostConfig()

    @property
    def best_metric(self) -> str | None:
        """What the best checkpoint is chosen by, as a Trainer's option."""
        chosen: str | None = self.trainer.get("metric_for_best_model")
        return chosen or ("eval_loss" if self.data.has_validation else None)

    @property
    def checkpoint_location(self) -> str:
        return self.checkpoint.location or str(Path(self.output_dir) / "checkpoints")

    def make_absolute(self) -> None:
        """Have every place named so that it is the same from whatever directory it is looked at."""
        self.output_dir = str(Path(self.output_dir).absolute())
        for name in ("location", "local_tier"):
            value = getattr(self.checkpoint, name)
            if value is not None and "://" not in value:
                setattr(self.checkpoint, name, str(Path(value).absolute()))

    def move_to(self, root: Path) -> None:
        """What lay in the run's folder when this was written lies in `root` now: the folder was copied, or renamed."""
        recorded, here = Path(self.output_dir).absolute(), root.absolute()
        for name in ("location", "local_tier"):
            value = getattr(self.checkpoint, name)
            if value is not None and "://" not in value and Path(value).is_relative_to(recorded):
                setattr(self.checkpoint, name, str(here / Path(value).relative_to(recorded)))
        self.output_dir = str(here)

    @property
    def tiers(self) -> Tiers:
        """Where checkpoints lie. Raises ValueError for what is not usable."""
        return open_tiers(self.checkpoint_location, self.checkpoint.local_tier)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(
    path: str | None,
    environment: Mapping[str, str],
    settings: Sequence[tuple[str, Any, str]] = (),
    *,
    needs_data: bool = True,
    script: str | None = None,
) -> Config:
    """Resolve a configuration.

    Args:
        path: YAML file. Without one the bundled job is the base, unless `script`, or a model or data that the
            environment or `settings` name, make it another job: nothing of the bundled one applies to that.
        environment: usually `os.environ`.
        settings: (dotted key, value, how the user wrote it) from the command line.
        needs_data: whether the model must be named and the training data exist.
        script: The user's own training script, which needs no model here.

    Raises:
        UsageError: a file is missing or malformed, a key unknown, a value of the wrong type, or no model is given.
    """
    sources: dict[str, str] = {}
    overrides: list[tuple[str, Any, str]] = []
    for key, (value, variable) in settings_from_environment(environment).items():
        overrides.append((key, value, variable))
        sources[key] = f"environment variable {variable}"
    for key, value, written in settings:
        overrides.append((key, value, written))
        sources[key] = f"command line {written}"
    document: dict[str, Any] = {}
    if path is not None:
        document = _read_yaml(Path(path))
    elif script is None and not _names_a_job(overrides):
        document = _read_yaml(DEFAULT_CONFIG)
    for key, value, written in overrides:
        _set(document, key, value, written)

    def source_of(key: str) -> str:
        return sources.get(key, str(path) if path is not None else "default configuration")

    document.setdefault("output_dir", _default_folder(script, path, document))
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        raise UsageError(_explain(error, source_of)) from None
    options: dict[str, Any] = {}
    for name, value in config.trainer.items():
        options |= trainer_options.validate({name: value}, source_of(f"trainer.{name}"))
    config.trainer = options
    _resolve_nodes(config, source_of)
    _check_files(config, source_of, needs_data=needs_data)
    if needs_data and script is None:
        _check_model(config)
    return config


def _names_a_job(overrides: Sequence[tuple[str, Any, str]]) -> bool:
    """Whether the environment or the command line name a model or data."""
    document: dict[str, Any] = {}
    for key, value, written in overrides:
        _set(document, key, value, written)
    return bool(_value(document, "model", "name_or_path") or _value(document, "data", "path"))


def _value(document: Mapping[str, Any], section: str, key: str) -> Any:
    values = document.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _default_folder(script: str | None, path: str | None, document: Mapping[str, Any]) -> str:
    """The folder of a run that nobody has given one."""
    data, model = _value(document, "data", "path"), _value(document, "model", "name_or_path")
    if script is not None or path is not None:
        name = Path(str(script or path)).stem
    elif model:
        name = Path(os.path.abspath(str(model))).name  # noqa: PTH100 - the name as given, not what it links to
    else:
        name = Path(str(data)).stem if data else ""
    return f"runs/{name or 'default'}"


def _check_model(config: Config) -> None:
    if config.model.name_or_path is None and not config.model.config:
        raise UsageError(
            "no model is configured; set model.name_or_path (variable MODEL_NAME) to a hub name or a local folder, or "
            f"model.config to build a new one. The bundled job's model is in {DEFAULT_CONFIG}, which --config accepts"
        )
    name = config.model.name_or_path
    if name is not None and _is_path(name) and not Path(name).is_dir():
        raise UsageError(f"model.name_or_path={name!r} does not exist; give a model's folder, or a name on the Hub")


def _is_path(name: str) -> bool:
    """Of what is on this machine, or the Hub's: asking that for a path takes a minute, and answers beside the point."""
    first, separator, rest = name.partition("/")
    # The Hub's names have one part, or two.
    return name.startswith((".", "/", "~")) or "/" in rest or (bool(separator) and Path(first).is_dir())


def parse_setting(text: str) -> tuple[str, Any, str]:
    """`key=value` of `--set`, the value read as YAML.

    Raises:
        UsageError: there is no `=`.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UsageError(f"--set {text!r}: write key=value, for example --set trainer.learning_rate=1e-4")
    try:
        return key, yaml.safe_load(value), f"--set {text}"
    except yaml.YAMLError:
        raise UsageError(f"--set {text!r}: the value is not valid YAML") from None


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not valid YAML ({' '.join(str(error).split())})") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{file}: must be a mapping of {', '.join(Config.model_fields)}")
    return document


def _set(document: dict[str, Any], key: str, value: Any, written: str) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        child = document.setdefault(parent, {})
        if child is None:
            child = document[parent] = {}
        if not isinstance(child, dict):
            raise UsageError(f"{written}: {parent} is not a section but {child!r}")
        document = child
    document[leaf] = value


def _explain(error: ValidationError, source_of: Any) -> str:
    """The first problem, as one line."""
    problem = error.errors()[0]
    location = [str(part) for part in problem["loc"] if part not in ("int", "literal['auto']")]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        section: Any = Config
        for part in location[:-1]:
            section = section.model_fields[part].annotation
        allowed = ", ".join(section.model_fields)
        return f"{source_of(key)}: unknown key {key} (value {problem['input']!r}); allowed here: {allowed}"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{source_of(key)}: {key}={problem['input']!r} is not allowed: write a mapping of names to values"
    return f"{source_of(key)}: {key}={problem['input']!r} is not allowed: {problem['msg'].lower()}"


def _resolve_nodes(config: Config, source_of: Any) -> None:
    launch = config.launch
    if launch.nproc_per_node != "auto" and launch.nproc_per_node < 1:
        raise UsageError(
            f"{source_of('launch.nproc_per_node')}: launch.nproc_per_node={launch.nproc_per_node} is not allowed: "
            "use auto or a number from 1"
        )
    if launch.node_rank and launch.nnodes == 1 and launch.world_size is None:
        raise UsageError(
            f"{source_of('launch.node_rank')}: node rank {launch.node_rank} needs --nnodes (or WORLD_SIZE) above it"
        )


def _unknown_scheme(url: str) -> str | None:
    """Why no file can be read at this URL, if so: nobody knows its scheme, or the package for it is missing."""
    import fsspec

    scheme = urlsplit(url).scheme
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        return str(error)
    except ImportError as error:
        return not_installed("s3fs", "s3") if scheme == "s3" else str(error)
    return None


def _check_files(config: Config, source_of: Any, *, needs_data: bool) -> None:
    try:
        _ = config.launch.peer_address
    except ValueError as error:
        raise UsageError(f"{source_of('launch.rdzv_endpoint')}: {error}") from None
    try:
        _ = config.tiers
    except ValueError as error:
        key = "checkpoint.local_tier" if "local_tier" in str(error) else "checkpoint.location"
        raise UsageError(f"{source_of(key)}: {error}") from None
    try:
        _ = config.checkpoint.memory_limit_bytes
    except ValueError as error:
        raise UsageError(f"{source_of('checkpoint.memory_limit')}: checkpoint.memory_limit: {error}") from None
    for name in ("path", "validation_path"):
        path = getattr(config.data, name)
        if needs_data and path and "://" not in path and _is_path(path) and not Path(path).exists():
            raise UsageError(
                f"{source_of(f'data.{name}')}: data.{name}={path!r} does not exist; give a .parquet, .jsonl, .json or "
                ".csv file, a folder, or the name of a hub data set"
            )
        if path is None or Path(path).suffix not in DATA_LOADERS:
            continue
        if "://" in path:
            if needs_data and (problem := _unknown_scheme(path)) is not None:
                raise UsageError(f"{source_of(f'data.{name}')}: data.{name}={path!r}: {problem}")
            continue
        if needs_data and not Path(path).is_file():
            raise UsageError(
                f"{source_of(f'data.{name}')}: data.{name}={path!r} does not exist; give a .parquet, .jsonl, .json or "
                ".csv file, or the name of a hub data set"
            )
        # A restart may come from another directory.
        setattr(config.data, name, os.path.abspath(path))  # noqa: PTH100 - keeps symlinks
    metric = str(config.trainer.get("metric_for_best_model") or "")
    if metric.endswith("perplexity"):
        raise UsageError(
            f"{source_of('trainer.metric_for_best_model')}: trainer.metric_for_best_model={metric!r} is not allowed: "
            "use eval_loss, which falls with it"
        )
    split = config.data.validation_split
    source = config.data.validation_path or config.data.path
    if split is not None and (source is None or Path(source).suffix in DATA_LOADERS):
        raise UsageError(
            f"{source_of('data.validation_split')}: data.validation_split={split!r} is a split of a hub data set, and "
            f"{source or 'the bundled data'} has none: use data.validation_path or data.validation_share"
        )
    if config.data.streaming:
        wrong = {
            "data.validation_share": config.data.validation_share is not None,
            "data.validation_split": split is not None and config.data.validation_path is None,
        }
        for key, is_wrong in wrong.items():
            if is_wrong:
                raise UsageError(
                    f"{source_of(key)}: {key} is not allowed with data.streaming, which never holds all rows: use "
                    "data.validation_path"
                )
        if not config.trainer.get("max_steps", 0) > 0:
            raise UsageError(
                f"{source_of('data.streaming')}: data.streaming needs trainer.max_steps: how long an epoch is, nobody "
                "knows before its end"
            )
    if config.strategy == "fsdp" and config.method.type != "full":
        raise UsageError(
            f"{source_of('strategy')}: strategy=fsdp is not supported with method.type={config.method.type} yet: use "
            "ddp, which an adapter's small state does not burden"
        )
    fsdp = config.trainer.get("fsdp_config")
    if fsdp and config.strategy != "fsdp":
        raise UsageError(f"{source_of('trainer.fsdp_config')}: trainer.fsdp_config needs strategy: fsdp")
    if fsdp and (not isinstance(fsdp, dict) or fsdp.get("version", 2) != 2):
        raise UsageError(
            f"{source_of('trainer.fsdp_config')}: trainer.fsdp_config={fsdp!r} is not allowed: write FSDP2's "
            "options as a mapping, without version or with version: 2"
        )
    given = [name for name in ("validation_path", "validation_share") if getattr(config.data, name) is not None]
    if len(given) > 1 or (config.data.validation_share is not None and config.data.validation_split is not None):
        raise UsageError(
            f"{source_of('data.validation_share')}: data.validation_share={config.data.validation_share} is not "
            "allowed beside data.validation_path or data.validation_split: choose one"
        )
