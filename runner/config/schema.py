"""The typed configuration of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from checkpointing.commit.retention import FurtherRetention, Retention
from checkpointing.commit.tiers import DEFAULT_LOCAL_KEEP_LAST, Tiers, open_tiers
from checkpointing.host.memory import parse_bytes

# Files of training data, by suffix: the builder of `datasets` that reads them.
DATA_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
DEFAULT_CONFIG = Path(__file__).parents[1] / "training" / "data" / "default.yaml"
# Events of a run that notifications report.
NotifyEvent = Literal["failed", "stuck", "resumed", "finished", "preempted"]
# For editors; scripts/render-reference makes it of the classes below.
JOB_SCHEMA = Path(__file__).with_name("job.schema.json")


class Section(BaseModel):
    """A section of the configuration; unknown keys are errors, and attribute docstrings describe the keys."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Model to fine-tune. Set `name_or_path` or `config`."""

    name_or_path: str | None = Field(default=None, examples=["HuggingFaceTB/SmolLM3-3B"])
    """Hub name or local folder of a pretrained model. Without it a new SmolLM3 is built from `config`, with a tokenizer
    trained on the data."""
    config: dict[str, Any] = Field(default_factory=dict)
    """SmolLM3Config fields of a new model, or overrides for a pretrained one."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """Attention implementation. `auto` uses flash-attn if it is installed and the GPU supports it, else SDPA."""
    vocab_size: int = Field(default=2048, ge=300)
    """Vocabulary size, in tokens, of the tokenizer trained for a new model."""


class MethodConfig(Section):
    """Fine-tuning method: all weights, or low-rank adapters."""

    type: Literal["full", "lora", "qlora"] = "full"
    """Weights to train. `full` trains every weight. `lora` trains low-rank adapters (arXiv 2106.09685) on a frozen base
    model and saves only the adapters. `qlora` does the same on a base model in 4 bits (arXiv 2305.14314); it needs
    bitsandbytes, and a model that is loaded by name."""
    r: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapters: their output is multiplied by alpha / r."""
    dropout: float = Field(default=0.05, ge=0, lt=1)
    """Dropout probability in front of the adapters during training."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get an adapter. `all-linear` selects every linear layer except the output layer."""
    modules_to_save: list[str] = Field(default_factory=list, examples=[["embed_tokens"]])
    """Names of further modules that are trained in full and saved with the adapters."""


Strategy = Literal["ddp", "fsdp", "fsdp_all_nodes", "deepspeed"]


class MeshConfig(Section):
    """A mesh of ranks. Ranks beyond `tp` x `dp_shard` hold replicas, so their number must be a multiple of that."""

    tp: int = Field(default=1, ge=1)
    """Ranks that compute each layer together (tensor parallelism). They get the same samples; keep them on one node."""
    dp_shard: int = Field(default=1, ge=1)
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2)."""

    @property
    def ranks(self) -> int:
        """Ranks that hold one copy of the state."""
        return self.tp * self.dp_shard

    def __str__(self) -> str:
        return f"{{tp: {self.tp}, dp_shard: {self.dp_shard}}}"


class DataConfig(Section):
    """Training and validation data."""

    path: str | None = Field(default=None, examples=["data/train.jsonl"])
    """Training data: a .parquet, .jsonl, .json or .csv file, a URL of one that fsspec can read, or the name of a hub
    data set. Rows have the columns `prompt` and `completion`, or `text`, or `messages`. Without it the bundled question
    and answer pairs are used."""
    split: str = "train"
    """Split of the hub data set to train on."""
    max_rows: Annotated[int, Field(ge=1)] | None = Field(default=None, examples=[1000])
    """Number of rows to train on, taken from the start, for a trial run. Without it all rows are used."""
    streaming: bool = False
    """Whether rows are read during training instead of before it, for data that does not fit on the disk. Needs
    `trainer.max_steps`."""
    shuffle_samples: Annotated[int, Field(ge=1)] | None = 10_000
    """Number of rows of a stream that are buffered and shuffled. `null` keeps the order of the stream."""
    validation_path: str | None = Field(default=None, examples=["data/validation.jsonl"])
    """Validation data, in the same formats as `path`. The model is evaluated by `trainer.eval_strategy`, by default at
    every save. `best_model` is then the checkpoint with the lowest eval_loss, or the best by
    `trainer.metric_for_best_model`. Saves triggered by `checkpoint.save_steps: auto` or `checkpoint.save_minutes` are
    not evaluated."""
    validation_split: str | None = Field(default=None, examples=["validation"])
    """Split of a hub data set (`validation_path`, or else `path`) to evaluate on."""
    validation_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(default=None, examples=[0.05])
    """Share of the training rows to hold out for evaluation, drawn with `trainer.seed`. Cannot be combined with the
    other validation keys."""

    @property
    def has_validation(self) -> bool:
        """Whether there is data for evaluations."""
        return any(value is not None for value in (self.validation_path, self.validation_split, self.validation_share))


def _home(value: str) -> str:
    """Replace a leading `~`, which no shell does within `--set KEY=VALUE`, nor YAML."""
    return str(Path(value).expanduser()) if value.startswith("~") else value


_Place = Annotated[str, AfterValidator(_home)]


def _loopback(value: Any) -> Any:
    """Read the null that earlier versions recorded."""
    return "127.0.0.1" if value is None else value


def _check_no_number(value: object) -> object:
    if isinstance(value, int):
        raise ValueError("use auto or null; a number of steps goes to trainer.save_steps, or to your script")
    return value


class CheckpointConfig(Section):
    """Checkpoint storage and intervals. `trainer.save_total_limit` sets how many checkpoints are kept."""

    location: _Place | None = Field(default=None, examples=["s3://bucket/prefix"])
    """Storage of the checkpoints: a directory, or a URL (`file://`, `s3://bucket/prefix`, or another scheme that fsspec
    supports). Without it `checkpoints` in `output_dir`. A run on several nodes needs a location that all nodes can
    reach."""
    local_tier: _Place | None = Field(default=None, examples=["/nvme/checkpoints"])
    """Fast local directory in front of `location`. Checkpoints are committed there first and copied to `location` in
    the background. It may be lost together with the node."""
    local_keep_last: Annotated[int, Field(ge=1)] = DEFAULT_LOCAL_KEEP_LAST
    """Number of newest checkpoints kept in `local_tier`."""
    keep_every_steps: Annotated[int, Field(ge=1)] | None = Field(default=None, examples=[1000])
    """Interval, in steps, of checkpoints that are kept permanently, in addition to the newest
    `trainer.save_total_limit` and the best by `trainer.metric_for_best_model`."""
    keep_best: Annotated[int, Field(ge=1)] = 1
    """Number of best checkpoints by `trainer.metric_for_best_model` that are kept, in addition to the newest
    `trainer.save_total_limit`."""
    snapshot_steps: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """Interval, in steps, between in-memory snapshots, from which a failed attempt resumes. `auto` derives it from the
    measured cost of a snapshot and the failure rate. `null` takes snapshots only for commits. What is set here, and the
    next three keys, overrules what a program says."""
    save_steps: Annotated[Literal["auto"] | None, BeforeValidator(_check_no_number)] = None
    """Interval between commits to storage. `null` leaves it to `trainer.save_steps`; `auto` derives it from the
    measured cost of a commit and the failure rate."""
    save_minutes: Annotated[float, Field(gt=0)] | None = Field(default=None, examples=[30])
    """Maximum minutes between commits. Without it time alone triggers no commit."""
    overhead_cap: float = Field(default=0.01, gt=0, le=1)
    """Maximum share of the run time that intervals set to `auto` may cost."""
    max_failed_saves: Annotated[int, Field(ge=1)] | None = 5
    """Number of consecutive failed saves after which the run stops with exit code 74. `null` never stops it."""
    memory_limit: str | int | None = Field(default=None, examples=["8GiB"])
    """Memory for snapshots on each node, in bytes or with a unit. Without it half of the free memory. Two snapshots are
    held if they fit, else one; if not even one fits, every save blocks training until it is written."""
    buddy_copies: bool = True
    """Where no node holds all of the state (FSDP over all nodes, for example), each node keeps a copy of another one's
    part in memory if it fits into `memory_limit`, so that losing a node loses no snapshot."""

    @property
    def further_retention(self) -> FurtherRetention:
        """Retention of the durable tier besides what the Trainer's arguments say."""
        return {"keep_every": self.keep_every_steps, "keep_best": self.keep_best}

    @property
    def local_retention(self) -> Retention:
        """Retention of `local_tier`."""
        return Retention(keep_last=self.local_keep_last)

    @property
    def memory_limit_bytes(self) -> int | None:
        """`memory_limit` in bytes. Raises ValueError if it is not a size."""
        return parse_bytes(str(self.memory_limit)) if self.memory_limit is not None else None


def _torchruns_counts(value: Any) -> Any:
    """Read `xpu` and `cpu`, which torchrun also accepts and Kubeflow sets."""
    return {"cpu": "auto", "xpu": "gpu"}.get(value, value) if isinstance(value, str) else value


def _or_range(schema: dict[str, Any]) -> None:
    """Add torchrun's MIN:MAX to the schema of a number."""
    number = {"type": schema.pop("type"), "minimum": schema.pop("minimum")}
    schema["anyOf"] = [number, {"type": "string", "pattern": "^[0-9]+(:[0-9]+)?$", "examples": ["2:4"]}]


def split_nnodes(text: str) -> tuple[int, int] | None:
    """Return the smallest and the largest number of nodes that torchrun's N or MIN:MAX names; None if it is neither."""
    smallest, colon, largest = text.partition(":")
    if not (smallest.isdecimal() and (largest.isdecimal() or not colon)):
        return None
    return int(smallest), int(largest or smallest)


class ResumeConfig(Section):
    """What makes a run resumable, and what a resumed one does besides restoring its state."""

    resilient: Literal["auto", "require", "off"] = "auto"
    """Whether the Trainers that a program makes, of Hugging Face or Lightning, are made resilient when they begin to
    train. `auto` does, and says at once where nothing of a program is saved; `require` ends such a program with exit
    code 78; `off` leaves all as it is."""
    verify: Literal["auto", "strict", "off"] = "auto"
    """Steps that are recomputed are compared with the record of their first computation. `auto` reports a
    difference; `strict` ends the run with exit code 78 before anything of such a step is kept, and resumes from the
    snapshot before the newest, where no step would be repeated otherwise; `off` records nothing."""


class LaunchConfig(Section):
    """Processes and nodes, named as in torchrun."""

    nproc_per_node: Annotated[
        Literal["auto", "gpu"] | Annotated[int, Field(ge=1)], BeforeValidator(_torchruns_counts)
    ] = "auto"
    """Number of ranks on this node. `auto` starts one per GPU, or 2 without GPUs; `gpu` one per GPU, and nothing on a
    node without GPUs."""
    nnodes: int = Field(default=1, ge=1, json_schema_extra=_or_range)
    """Number of nodes; the largest number if `min_nodes` is set."""
    min_nodes: Annotated[int, Field(ge=1)] | None = Field(default=None, examples=[2])
    """Smallest number of nodes with which training continues when others are lost, as MIN in torchrun's `--nnodes
    MIN:MAX`. Without it `nnodes`, so that every loss stops all nodes until that node is back. Batch and learning rate
    are those of `nnodes` nodes, however many there are."""
    last_call_s: float = Field(default=30.0, ge=0)
    """Seconds that a start with `min_nodes` waits for further nodes once there are enough."""
    grow_interval_s: float = Field(default=300.0, ge=0)
    """Seconds from one change of the nodes to the admission of further ones: each costs a pause of all nodes."""
    evict_slow_nodes: bool = False
    """Whether a run with `min_nodes` continues without a node whose ranks compute at least 1.3 times as long as the
    median rank, if enough nodes are left; its machine is then excluded as one whose hardware failed
    (`restart.exclude_hours`). The leader is never left out. Without it slow ranks are only reported."""
    check_gpus: bool = True
    """Whether each node of several computes and stores known values on its GPUs, and adds up over all of them, before
    it takes part, while the ranks' libraries load. A node whose GPUs fail exits with 80, and its machine is excluded
    (`restart.exclude_hours`)."""
    node_rank: int = Field(default=0, ge=0)
    """Rank of this node, from 0. In a PyTorchJob the variable RANK sets it."""
    world_size: int | None = Field(default=None, ge=1, examples=[16])
    """Number of ranks on all nodes (variable WORLD_SIZE). Determines `nnodes` if nobody has said that."""
    rdzv_endpoint: str | None = Field(default=None, examples=["node0:29500"])
    """Rendezvous endpoint of the nodes, host:port. Without it `master_addr`:`master_port`."""
    rdzv_backend: Literal["c10d", "static"] = "c10d"
    """Accepted because operators set it for torchrun; both are the same here. The runners know the nodes of an attempt,
    and their ranks meet at a store that the leader keeps."""
    master_addr: str | None = Field(default=None, examples=["node0"])
    """Host of the rendezvous on several nodes, if `rdzv_endpoint` is not set."""
    master_port: int = Field(default=29500, ge=1, le=65535)
    """Port of the rendezvous on several nodes, if `rdzv_endpoint` is not set."""
    peer_port: int | None = Field(default=None, ge=1, le=65535, examples=[29501])
    """Port on the leading node over which the runners of all nodes communicate. Without it the rendezvous port + 1."""
    peer_bind: str | None = Field(default=None, min_length=1, examples=["10.0.0.5"])
    """Address of the first node to listen on (another node that leads uses its own). Without it all addresses."""
    local_addr: str | None = Field(default=None, examples=["10.0.0.5"])
    """Address or host name under which other nodes reach this one. Without it the host name."""
    rendezvous_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds to wait for the other nodes, at the start and after a node was lost; and, at a start, for storage that
    the run was using before."""
    cold: bool = False
    """Whether every rank starts in a fresh interpreter instead of a fork of a preloaded one. Needed by scripts that
    initialize CUDA or start threads when imported."""

    @model_validator(mode="before")
    @classmethod
    def _split_nnodes(cls, values: Any) -> Any:
        """Accept torchrun's MIN:MAX as `nnodes`."""
        if not isinstance(values, dict) or not isinstance(values.get("nnodes"), str):
            return values
        found = split_nnodes(values["nnodes"])
        if found is None:
            return values
        smallest, largest = found
        return {**values, "nnodes": largest, **({"min_nodes": smallest} if ":" in values["nnodes"] else {})}

    @property
    def endpoint(self) -> str:
        """Rendezvous endpoint of several nodes, host:port."""
        return self.rdzv_endpoint or f"{self.master_addr or 'localhost'}:{self.master_port}"

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Host and port of the first node, where its ranks and runners are reached."""
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdigit():
            host, port = self.endpoint.rstrip(":"), str(self.master_port)
        return host.strip("[]"), int(port)

    @property
    def peer_address(self) -> tuple[str, int]:
        """Host and port of the first node's runner. Raises ValueError if the port is out of range."""
        host, port = self.rendezvous_address
        number = self.peer_port or port + 1
        if not 0 < number < 65536:
            raise ValueError(f"port {number} for the connection between runners is out of range; set launch.peer_port")
        return host, number


def _yaml_off(value: Any) -> Any:
    """Undo that YAML reads an unquoted off as false."""
    return "off" if value is False else value


def _check_endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.port == 0:
        raise ValueError("write http://host:port")
    return value


class RestartConfig(Section):
    """Restarts, timeouts and stop requests."""

    max_restarts: int = Field(default=5, ge=0)
    """Maximum number of restarts without a newly committed checkpoint between them."""
    max_network_retries: int = Field(default=20, ge=0)
    """Maximum number of restarts after network failures of a rank (connection, timeout, DNS, HTTP 5xx and 429) without
    a newly committed checkpoint between them. They do not count against `max_restarts`."""
    backoff_initial_s: float = Field(default=1.0, ge=0)
    """Seconds before the second restart without progress. The first restart is immediate; each further wait is twice
    as long."""
    backoff_max_s: float = Field(default=60.0, ge=0)
    """Maximum seconds before a restart."""
    backoff_jitter_s: float = Field(default=1.0, ge=0)
    """Maximum random addition to each wait, in seconds."""
    grace_s: float = Field(default=60.0, ge=0)
    """Seconds that ranks may take to checkpoint after a stop request."""
    hang_timeout_s: Annotated[float, Field(gt=0)] | None = Field(default=None, examples=[300])
    """Seconds after which an unfinished step counts as a hang. Without it 3 x the 99th percentile of the step times of
    this run + 5 s, and twice as long after each attempt that has hung, for as long as they do."""
    first_step_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds after which an unfinished step counts as a hang at the start of an attempt and while torch.compile
    runs."""
    quiet_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds without a sign of progress that count as a hang outside steps: start-up, restore, saving, and between two
    evaluation batches."""
    exclude_hours: float = Field(default=24.0, ge=0)
    """Hours for which a machine whose hardware has failed (exit code 80) is not admitted to a run of several nodes. A
    reboot ends that. 0 admits it at once."""
    preemption_notices: Annotated[Literal["off", "aws", "gcp", "azure"], BeforeValidator(_yaml_off)] = "off"
    """Cloud whose metadata service is polled for termination notices; a notice is handled as a stop request. `aws`:
    spot interruption and rebalance recommendation. `gcp`: preemption and terminating host maintenance. `azure`:
    scheduled Preempt, Terminate, Reboot and Redeploy events."""
    metadata_endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = Field(
        default=None, examples=["http://127.0.0.1:8080"]
    )
    """URL of the metadata service, http://host:port. Without it http://169.254.169.254, as on every cloud."""


class ElasticConfig(Section):
    """What another number of ranks changes."""

    mode: Literal["samples", "exact"] = "samples"
    """What stays the same. `samples` keeps the samples of each step and the learning rate, and losses up to the order
    of sums. `exact` keeps all bits: a fixed number of virtual ranks computes each step, divided among the ranks that
    there are (DDP only). A script that calls `resilient(virtual_ranks=...)` needs it, too, to be started on any number
    of ranks."""
    virtual_ranks: Annotated[int, Field(ge=1)] | None = Field(default=None, examples=[8])
    """Number of virtual ranks with `mode: exact`, at least that of ranks. Without it the number of ranks with which the
    run begins, or with `min_nodes` that of `nnodes` nodes. It is kept with the run."""


class GuardsConfig(Section):
    """Steps that are discarded.

    Training resumes from the newest snapshot before such a step. If the step fails again, it is skipped together with
    all steps since that snapshot.
    """

    check_finite: bool = True
    """Whether steps with infinite or NaN gradients are discarded."""
    spike_zscore: Annotated[float, Field(gt=0)] | None = Field(default=None, examples=[8])
    """Loss spike threshold, in robust standard deviations above the median loss of the last 64 steps; 8 is a good
    choice. Without it spikes are not detected."""
    max_skipped_windows: int = Field(default=3, ge=0)
    """Maximum number of skipped windows of steps per run. One more ends the run with exit code 78."""


class TrackingConfig(Section):
    """Experiment tracking with Aim. `trainer.report_to` selects other trackers."""

    aim_repo: str | None = Field(default=None, examples=["/aim"])
    """Aim repository, a path or URL (variable AIM_REPO). Needs the extra `aim`. Without it nothing is tracked in
    Aim."""
    experiment: str | None = Field(default=None, examples=["my-experiment"])
    """Name of the Aim experiment. Without it the name of the run's folder."""


class MonitoringConfig(Section):
    """Prometheus metrics."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(default=None, examples=[9400])
    """Port on the leading node that serves Prometheus metrics at /metrics (option `--metrics-port`). Without it no
    metrics are served."""
    address: Annotated[str, BeforeValidator(_loopback)] = Field(default="127.0.0.1", examples=["0.0.0.0"])
    """Address to listen on. By default only processes of the same machine can connect."""


def _check_webhook(value: SecretStr) -> SecretStr:
    """Refuse what no webhook's address is; the message must not repeat it."""
    try:
        parts = urlsplit(value.get_secret_value())
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or "@" in parts.netloc or not value.get_secret_value().isprintable():
        raise ValueError("write https://HOST/PATH, or http://, without user and password")
    return value


class NotifyConfig(Section):
    """Messages to a webhook when something happens to the run."""

    url: Annotated[SecretStr, AfterValidator(_check_webhook)] | None = Field(
        default=None, examples=["https://hooks.example.com/training"]
    )
    """Address to which messages are posted, https or http (variable RUNNER_NOTIFY_URL). It is treated as a secret, and
    recorded nowhere. Without it nothing is sent."""
    format: Literal["json", "slack"] = "json"
    """Body of a message. `json` has a type and named facts; `slack` is `{"text": ...}`, as Slack's incoming webhooks
    take it."""
    secret_env: str | None = Field(default=None, min_length=1, examples=["NOTIFY_SECRET"])
    """Name of the environment variable with the key, in base64, that signs messages as
    [Standard Webhooks](https://www.standardwebhooks.com) says. Without it they are not signed."""
    events: list[NotifyEvent] = Field(default=[*get_args(NotifyEvent)], min_length=1)
    """What to report: the run has `failed`, is `stuck` (ranks hang), has `resumed` training, has `finished`, or was
    `preempted` (stopped on request). By default all of it."""


class CostConfig(Section):
    """Prices for `runner report` and `runner plan`."""

    price_per_hour: Annotated[float, Field(ge=0)] | None = Field(default=None, examples=[12.5])
    """On-demand price of one node per hour, in `currency`. Without it no cost is reported."""
    spot_discount: float = Field(default=0.0, ge=0, lt=1)
    """Discount of a spot node, as a share of `price_per_hour`."""
    currency: str = "USD"
    """Currency of `price_per_hour`."""


class Config(Section):
    """Configuration of a run."""

    output_dir: Annotated[str, Field(min_length=1, pattern=r"\S"), AfterValidator(_home)] = "runs/default"
    """Folder of the run: checkpoints, journal, logs and `best_model`. Without it `runs/NAME`, where NAME is the name of
    the configuration file, script, model or data."""
    scale_learning_rate: bool = True
    """Whether `trainer.learning_rate` is multiplied by the number of ranks, or by `elastic.virtual_ranks`."""
    strategy: Strategy | MeshConfig = "ddp"
    """Parallelism. `ddp` holds the whole model on every rank. `fsdp` (FSDP2) shards parameters, gradients and optimizer
    state over the ranks of a node and replicates them between nodes; `fsdp_all_nodes` shards over the ranks of all
    nodes, for a model whose state no node can hold. `trainer.fsdp_config` tunes both. `deepspeed` is ZeRO 1, 2 or 3 by
    the configuration in `trainer.deepspeed`. A mapping is a mesh: `{tp: 2, dp_shard: 4}` is tensor parallelism over 2
    ranks under FSDP2 over 4. A checkpoint of any can be resumed with any other."""
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    data: DataConfig = DataConfig()
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Options of TRL's SFTConfig, by their own names. `runner config --trainer-options` lists them."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    launch: LaunchConfig = LaunchConfig()
    elastic: ElasticConfig = ElasticConfig()
    restart: RestartConfig = RestartConfig()
    guards: GuardsConfig = GuardsConfig()
    tracking: TrackingConfig = TrackingConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    notify: NotifyConfig = NotifyConfig()
    cost: CostConfig = CostConfig()

    @property
    def mesh(self) -> MeshConfig | None:
        """The strategy, if it is a mesh."""
        return self.strategy if isinstance(self.strategy, MeshConfig) else None

    @property
    def model_ranks(self) -> int:
        """Number of ranks that compute the same samples together (tensor parallelism)."""
        return self.mesh.tp if self.mesh is not None else 1

    def sharing(self, ranks: int) -> int:
        """Return how many share the samples of a step: groups of `model_ranks` ranks, or virtual ranks."""
        exact = self.elastic.mode == "exact"
        return (exact and self.elastic.virtual_ranks) or ranks // self.model_ranks

    @property
    def best_metric(self) -> str | None:
        """The metric of the best checkpoint, as the Trainer's option; None if there is none."""
        chosen: str | None = self.trainer.get("metric_for_best_model")
        return chosen or ("eval_loss" if self.data.has_validation else None)

    @property
    def checkpoint_location(self) -> str:
        """Durable location of the checkpoints: a folder or a URL."""
        return self.checkpoint.location or str(Path(self.output_dir) / "checkpoints")

    def make_absolute(self) -> None:
        """Make the run's paths independent of the working directory."""
        self.output_dir = str(Path(self.output_dir).absolute())
        for name in ("location", "local_tier"):
            value = getattr(self.checkpoint, name)
            if value is not None and "://" not in value:
                setattr(self.checkpoint, name, str(Path(value).absolute()))

    def move_to(self, root: Path) -> None:
        """Adjust paths after the run's folder was copied or renamed.

        Args:
            root: The folder now.
        """
        recorded, here = Path(self.output_dir).absolute(), root.absolute()
        for name in ("location", "local_tier"):
            value = getattr(self.checkpoint, name)
            if value is not None and "://" not in value and Path(value).is_relative_to(recorded):
                setattr(self.checkpoint, name, str(here / Path(value).relative_to(recorded)))
        self.output_dir = str(here)

    @property
    def tiers(self) -> Tiers:
        """Storage of the checkpoints. Raises ValueError for a location that cannot be used."""
        return open_tiers(self.checkpoint_location, self.checkpoint.local_tier)

    def to_yaml(self) -> str:
        """Return the whole configuration as YAML, without secrets."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude={"notify": {"url"}}), sort_keys=False)
