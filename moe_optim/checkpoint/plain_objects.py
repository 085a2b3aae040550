"""Refuses objects that would run code when Megatron unpickles them.

Megatron unpickles the objects of a torch_dist checkpoint without restrictions, so that they may
call any function.
"""

import dataclasses
import enum
import io
import sys

from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.metadata import Blob
from moe_optim.checkpoint.files.pickles import MEGATRONS_PACKAGES, Named, foreign_name
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.errors import LayoutError
from moe_optim.integration.installation import config_or_bf16


def plain_bytes(stored: TorchDistReader, blob: Blob) -> bytes:
    """Return an object as it is stored, once its checksums fit.

    LayoutError if its unpickling would run code, unless ``trust_checkpoint_code`` allows that.
    """
    content = stored.read_bytes(blob)
    if config_or_bf16().trust_checkpoint_code:
        return content
    why = foreign_name(Archive(io.BytesIO(content)).pickled(), _is_passive)
    if why is not None:
        raise LayoutError(
            f"{stored.path / blob.file}: {blob.key}: expected plain data, got an object that "
            f"Megatron would run code for while it loads: {why}. If you trust its author (types of "
            "your own among its arguments are such code, too), set "
            "moe_optim.trust_checkpoint_code=true; else load another checkpoint."
        )
    return content


def _is_passive(named: Named) -> bool:
    """Return whether a name is an enumeration or dataclass of Megatron's packages.

    Considers loaded modules only: a checkpoint cannot cause an import.
    """
    found = getattr(sys.modules.get(named.module), named.name, None)
    if not isinstance(found, type):
        return False
    # check the class's own module, too: modules may re-export foreign classes
    packages = {module.partition(".")[0] for module in (named.module, found.__module__)}
    is_value = issubclass(found, enum.Enum) or dataclasses.is_dataclass(found)
    return is_value and packages <= MEGATRONS_PACKAGES
