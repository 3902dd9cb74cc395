"""TorchRec's collections on Hotrow's tables, and its `KeyedJaggedTensor` from and to a `Batch`.

    from hotrow.torchrec import EmbeddingBagCollection      # instead of: from torchrec import ...

    ebc = EmbeddingBagCollection(tables=configs, optimizer=RowWiseAdagrad(lr=0.02))
    model(ebc(kjt)).backward()
    ebc.step()                                              # beside the dense optimizer's step

Same configs in, same outputs, same names in the state dict; what a config asks for and Hotrow does not do is
refused by name. Three things differ, because tables grow. Keys may be any int64, so `num_embeddings` costs no
memory and bounds nothing: it sets the scale of new rows and the shape of the state dict. Rows are no
parameters, so the optimizer is given here and applied by `step`; `optimizer()` is TorchRec's view of it. In
evaluation mode rows are read without gradients. docs/torchrec.md lists what is refused.
"""

try:
    import torchrec as _torchrec  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"hotrow.torchrec needs TorchRec, which could not be imported ({error}). "
        f"Install it with: pip install 'hotrow[torchrec]'"
    ) from error

from hotrow.torchrec.collection import EmbeddingBagCollection, EmbeddingCollection
from hotrow.torchrec.kjt import from_kjt, to_kjt

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "from_kjt", "to_kjt"]
