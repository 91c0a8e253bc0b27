"""What names in a trace mean: kinds of communication, dtypes, and what computes.

A kernel of NCCL has had two forms of name, and its dtype says what is summed. One that only moves bytes says `int8_t`
or nothing, whatever the tensor:

    before 2.19   ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)
    since         ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
    RCCL (AMD)    ncclDevKernel_Generic(…): the kind is only in the facts beside it

Sources: traces of HolisticTraceAnalysis (tests/data), TraceLens (tests/traces) and of torch 2.13.
"""

import re

KINDS = {  # letters of a name → the kind; the first that the name contains
    **{"allreduce": "all_reduce", "crossdevicereduce": "all_reduce"},
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    **{name: name for name in ("broadcast", "barrier", "scatter", "gather", "reduce")},
    **{"sendrecv": "send", "send": "send", "recv": "recv"},
}
DTYPES = {  # as gloo's inputs, NCCL's facts and NCCL's kernels name them → name, bytes
    **dict.fromkeys(("float", "f32"), ("float32", 4)),
    **dict.fromkeys(("double", "f64"), ("float64", 8)),
    **dict.fromkeys(("half", "f16"), ("float16", 2)),
    **dict.fromkeys(("bfloat16", "bf16"), ("bfloat16", 2)),
    **dict.fromkeys(("long", "long int", "i64", "int64_t"), ("int64", 8)),
    **dict.fromkeys(("int", "i32", "int32_t"), ("int32", 4)),
    **dict.fromkeys(("byte", "unsigned char", "u8", "uint8_t"), ("uint8", 1)),
    **dict.fromkeys(("char", "signed char", "i8", "int8_t"), ("int8", 1)),
    "bool": ("bool", 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
}
SUMS = ("all_reduce", "reduce_scatter", "reduce")  # the dtype in the name of their kernel is that of the tensor
PEER_TO_PEER = ("send", "recv")
ONE_SIDED = ("broadcast", "reduce", "gather", "scatter")  # a rank may end before another begins
# Kernels that communicate: of libraries, of symmetric memory, those of experts, and all-reduces of servers.
OF_A_LINK = re.compile(
    "ccl|multimem_|(one|two)_shot_all|symm_mem|deep_ep|dpsk::ep|cross_device_reduce", re.IGNORECASE
)
OF_EXPERTS = re.compile("deep_ep|dpsk::ep")
KERNEL, LAUNCH = ("kernel",), ("cuda_runtime", "cuda_driver", "runtime")
MEMORY = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")


def kind_meant(name: str) -> str:
    """The kind of communication that a name means; "" if none."""
    letters = re.sub("[^a-z]", "", name.lower())
    found = next((kind for word, kind in KINDS.items() if word in letters), "")
    return found or ("all_to_all" if OF_EXPERTS.search(name) else "")


def dtype_meant(said: str) -> tuple[str, int]:
    """Name and bytes of a dtype, as PyTorch or C++ call it; its own word and 0 bytes if it is not known."""
    return DTYPES.get(said.lower().removeprefix("c10::"), (said, 0))


def is_dtype(said: object) -> bool:
    """Whether a word is the name of a dtype, as an operator says of its inputs, and not `TensorList`."""
    return isinstance(said, str) and dtype_meant(said)[1] > 0


def dtype_of_kernel(kind: str, name: str) -> str:
    """The dtype in the name of a kernel, as it stands there; "" if it says none."""
    if of_template := re.search(r"c10::\w+", name):
        return of_template[0]
    if kind not in SUMS:
        return ""
    words = re.sub(r"\(.*", "", name).replace("int8_t", "int8").split("_")
    return next((word for word in reversed(words) if word.lower() in DTYPES), "")


def communicates(category: str, name: str) -> bool:
    """Whether an event is communication on the link: work of gloo, a kernel of NCCL, RCCL or of those beside them."""
    return category in KERNEL and OF_A_LINK.search(name) is not None or name.startswith("gloo:")
