"""The question, as data: what the user asks beside the model and its inputs.

``Request`` is what the user writes; every field has a default. ``resolve`` turns it into a ``Question`` in which
nothing is open any more, and which remembers what had to be assumed.
"""

from dataclasses import dataclass, field
from typing import Literal

from autoshard.errors import RequestError
from autoshard.hardware import DeviceProfile, load_profile
from autoshard.sizes import parse_bytes

Recompute = Literal["auto", "none", "full"]
Reshard = Literal["auto", "always", "never"]
Objective = Literal["time", "memory"]
Compile = Literal["none", "blocks"]
GradientSync = Literal["every", "last"]
ZeroGrad = Literal["none", "zeros"]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element by dtype name, for the dtypes that a parameter may have."""

LEVELS = ("rules", "dry-run")
"""Levels of verification: the static rules alone, or the rules and one step of the sharded model on fake tensors."""

COMPILE = ("none", "blocks")
OPTIMIZERS = (
    "adamw",
    "adamw-foreach",
    "adamw-fused",
    "adamw-for-loop",
    "adamw-8bit",
    "sgd",
    "sgd-momentum",
)
"""Plain ``adamw`` is the form that torch picks: foreach on accelerators, the loop over parameters on cpu."""
ADAFACTOR = (
    "another optimizer: torch 2.13's Adafactor raises on parameters that FSDP2 shards, because it changes in place "
    "the mean over a sharded dim"
)
PRECISIONS = {"bf16": ("bfloat16", "float32"), "fp32": ("same", "same")}
"""Named precisions: (compute dtype of parameters, dtype of the reduction); ``same`` keeps the stored dtype."""

DEFAULT_DEVICE = "h100-80gb"
DEFAULT_NUM_DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asks; the names are the command line's options.

    Attributes:
        device: name of a device profile, or path of a profile's JSON file; ``None`` takes the accelerators found.
        devices: number of devices; ``None`` takes those found.
        memory: what tensors may occupy on one device, bytes or text such as ``60GiB``; ``None`` takes the profile's
            memory minus its named headroom.
        precision: ``bf16`` (bf16 compute, stored dtype kept, fp32 reduction) or ``fp32`` (everything as stored);
            ``None`` takes bf16 on accelerators and fp32 on cpu.
        optimizer: one of ``OPTIMIZERS``.
        recompute: which blocks recompute their activations: ``auto``, ``none`` or ``full``.
        mesh: ``auto``, the number of devices (``8``), or ``REPLICATE x SHARD`` (``2x4``).
        reshard: ``auto``, ``always`` or ``never`` reshard after forward.
        compile: ``none``, or ``blocks`` for ``torch.compile`` on each repeated block.
        objective: ``time``, or ``memory`` for the least peak.
        root_percent: the most of the parameter bytes that the root unit may own where the rules allow less; ``None``
            leaves it to the objective, and plans a model of at most 4 MiB in units of at most a quarter of it.
        micro_batches: forwards and backwards before one step of the optimizer; the inputs are those of one.
        gradient_sync: with several, gradients are reduced in ``every`` one, or in the ``last`` alone.
        zero_grad: what ``zero_grad`` leaves: ``none``, or ``zeros`` (``set_to_none=False``).
        clip: gradients are clipped by their norm before the optimizer's step.
        methods: methods other than forward that run a module, as ``fqn:method``.
    """

    device: str | None = None
    devices: int | None = None
    memory: int | str | None = None
    precision: str | None = None
    optimizer: str = "adamw"
    recompute: Recompute = "auto"
    mesh: str = "auto"
    reshard: Reshard = "auto"
    compile: Compile = "none"
    objective: Objective = "time"
    root_percent: int | None = None
    micro_batches: int = 1
    gradient_sync: GradientSync = "every"
    zero_grad: ZeroGrad = "none"
    clip: bool = False
    methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request in which nothing is open.

    Attributes:
        profile: the device and its links.
        num_replicas: size of the replicate axis, 1 if there is none.
        num_shards: size of the shard axis.
        allowed_bytes: what tensors may occupy on one device.
        param_dtype: compute dtype of parameters, ``same`` for the stored one.
        reduce_dtype: dtype of the gradient reduction, ``same`` for the compute dtype.
        optimizer: as in the request.
        recompute: as in the request.
        reshard: as in the request.
        objective: as in the request.
        root_percent: as in the request.
        compile: as in the request.
        micro_batches: as in the request.
        gradient_sync: as in the request.
        zero_grad: as in the request.
        clip: as in the request.
        assumed: every default that was taken, as ``field=value (why)``, in the order of the fields.
    """

    profile: DeviceProfile
    num_replicas: int
    num_shards: int
    allowed_bytes: int
    param_dtype: str
    reduce_dtype: str
    optimizer: str
    recompute: Recompute
    reshard: Reshard
    objective: Objective
    root_percent: int | None
    compile: Compile = "none"
    micro_batches: int = 1
    gradient_sync: GradientSync = "every"
    zero_grad: ZeroGrad = "none"
    clip: bool = False
    assumed: tuple[str, ...] = field(default=())

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.num_replicas * self.num_shards

    @property
    def compute_dtype(self) -> str:
        """Dtype name that floating point inputs and parameters have while they compute (float32 for ``same``)."""
        return "float32" if self.param_dtype == "same" else self.param_dtype


def resolve(request: Request, found: tuple[str, int] | None = None) -> Question:
    """The question that a request asks, with every default filled in and named.

    Args:
        request: what the user wrote.
        found: profile name and number of the accelerators of this machine, ``None`` if there are none.

    Raises:
        RequestError: a field is not among its choices, a size or mesh cannot be read, a profile is unknown, or the
            allowance is more than the device has.
    """
    assumed: list[str] = []
    for name in ("device", "precision", "mesh"):
        value = getattr(request, name)
        if not isinstance(value, str) and not (value is None and name != "mesh"):
            raise RequestError(name, value, "text")
    if request.optimizer == "adafactor":
        raise RequestError("optimizer", "adafactor", ADAFACTOR)
    _require_choice("optimizer", request.optimizer, OPTIMIZERS)
    _require_choice("recompute", request.recompute, ("auto", "none", "full"))
    _require_choice("reshard", request.reshard, ("auto", "always", "never"))
    _require_choice("objective", request.objective, ("time", "memory"))
    if request.root_percent is not None:
        _require_percent("root_percent", request.root_percent)
    _require_choice("compile", request.compile, COMPILE)
    _require_choice("gradient_sync", request.gradient_sync, ("every", "last"))
    _require_choice("zero_grad", request.zero_grad, ("none", "zeros"))
    if not isinstance(request.clip, bool):
        raise RequestError("clip", request.clip, "True or False")
    count = request.micro_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise RequestError("micro_batches", count, "a whole number of micro-batches, 1 or more")

    device, why = request.device, ""
    if device is None:
        device, why = (found[0], "found on this machine") if found else (DEFAULT_DEVICE, "no accelerator found")
        assumed.append(f"device={device} ({why})")
    profile = load_profile(device)

    num_devices = request.devices
    if num_devices is None:
        is_found = found is not None and found[0] == device
        num_devices = found[1] if found is not None and is_found else DEFAULT_NUM_DEVICES
        if request.mesh.isascii() and request.mesh.isdigit():
            num_devices = int(request.mesh)
        elif "x" in request.mesh:
            num_devices = 0
        else:
            assumed.append(f"devices={num_devices} ({'found on this machine' if is_found else 'default'})")
    elif isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise RequestError("devices", request.devices, "a whole number of devices, 1 or more")
    num_replicas, num_shards = _read_mesh(request.mesh, num_devices)

    if request.memory is None:
        allowed_bytes = profile.memory_bytes - profile.headroom_bytes
        kept = ", ".join(part.name for part in profile.headroom)
        assumed.append(f"memory={allowed_bytes} bytes (the device's memory minus headroom: {kept})")
    else:
        try:
            allowed_bytes = parse_bytes(request.memory)
        except ValueError as error:
            raise RequestError("memory", request.memory, str(error)) from None
        if allowed_bytes > profile.memory_bytes:
            raise RequestError(
                "memory",
                request.memory,
                f"at most {profile.memory_bytes} bytes on {profile.name}",
                "ask for less, or name another --device",
            )

    precision = request.precision
    if precision is None:
        precision = "fp32" if profile.kind == "cpu" else "bf16"
        assumed.append(f"precision={precision} (default on {profile.kind})")
    _require_choice("precision", precision, tuple(PRECISIONS))
    param_dtype, reduce_dtype = PRECISIONS[precision]
    return Question(
        profile=profile,
        num_replicas=num_replicas,
        num_shards=num_shards,
        allowed_bytes=allowed_bytes,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        optimizer=request.optimizer,
        recompute=request.recompute,
        reshard=request.reshard,
        objective=request.objective,
        root_percent=request.root_percent,
        compile=request.compile,
        micro_batches=request.micro_batches,
        gradient_sync=request.gradient_sync,
        zero_grad=request.zero_grad,
        clip=request.clip,
        assumed=tuple(assumed),
    )


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RequestError(name, value, "one of " + ", ".join(choices))


def _require_percent(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise RequestError(name, value, "a whole number from 0 to 100")


def _read_mesh(mesh: str, num_devices: int) -> tuple[int, int]:
    expected = "auto, the number of devices, or REPLICATExSHARD such as 2x4"
    if num_devices:
        expected += f", {num_devices} devices in all"
    if mesh == "auto":
        return 1, num_devices
    parts = mesh.split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise RequestError("mesh", mesh, expected)
    num_shards = int(parts[-1])
    num_replicas = int(parts[0]) if len(parts) == 2 else 1
    if num_devices and num_replicas * num_shards != num_devices:
        raise RequestError("mesh", mesh, expected)
    return num_replicas, num_shards
