"""Packages that stand-ins replace where a stack runs on CPU ranks: engines, clusters, loggers."""

from collections.abc import Mapping

_LAUNCHERS = (
    "ray", "sglang", "sglang_router", "wandb", "httpx", "pylatexenc", "fastapi", "uvicorn",
    "polars", "starlette", "setproctitle", "pybase64", "openai", "aiohttp", "zstandard", "mooncake",
)  # fmt: skip
STAND_INS: Mapping[str, tuple[str, ...]] = {
    "slime": _LAUNCHERS,
    "miles": _LAUNCHERS,
    "verl": (
        "ray", "sglang", "vllm", "wandb", "codetiming", "flash_attn", "math_verify", "pylatexenc",
        "liger_kernel", "uvicorn", "fastapi", "scipy", "aiohttp", "diffusers", "qwen_vl_utils",
        "webdataset", "multistorageclient", "starlette", "defusedxml", "orloge", "msgpack",
        "jsonschema", "megatron.energon",
    ),
    "nemo_rl": (
        "ray", "zmq", "orloge", "scipy", "megatron.energon", "diffusers", "wandb", "webdataset",
        "vllm", "defusedxml", "pynvml", "uvicorn", "fastapi", "mlflow", "swanlab",
        "prometheus_client",
    ),
}  # fmt: skip
