"""The one typed configuration of a run: defaults < YAML < environment < command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from checkpointing.memory import parse_bytes
from checkpointing.tiers import DEFAULT_LOCAL_KEEP_LAST, Tiers, open_tiers

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
