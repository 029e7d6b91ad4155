"""Models built on `anydevice.ops`: layers are plain descriptions, parameters are trees of arrays.

>>> model = nn.build(nn.Dense(64, 128), "relu", nn.Dense(128, 10), device="cpu")
>>> model.output_shape, model.parameter_count
((10,), 9610)

The same model runs, with the same parameters for the same seed, on every engine. Every name loads
when it is first used.
"""

from __future__ import annotations

from anydevice._core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice._nn.convolution import AvgPool1d as AvgPool1d
    from anydevice._nn.convolution import AvgPool2d as AvgPool2d
    from anydevice._nn.convolution import Conv1d as Conv1d
    from anydevice._nn.convolution import Conv2d as Conv2d
    from anydevice._nn.convolution import ConvTranspose2d as ConvTranspose2d
    from anydevice._nn.convolution import GlobalAvgPool as GlobalAvgPool
    from anydevice._nn.convolution import GlobalMaxPool as GlobalMaxPool
    from anydevice._nn.convolution import MaxPool1d as MaxPool1d
    from anydevice._nn.convolution import MaxPool2d as MaxPool2d
    from anydevice._nn.convolution import Upsample as Upsample
    from anydevice._nn.initializers import Constant as Constant
    from anydevice._nn.initializers import Initializer as Initializer
    from anydevice._nn.initializers import Normal as Normal
    from anydevice._nn.initializers import Scaled as Scaled
    from anydevice._nn.initializers import Uniform as Uniform
    from anydevice._nn.layer import Layer as Layer
    from anydevice._nn.layer import Run as Run
    from anydevice._nn.layers import Activation as Activation
    from anydevice._nn.layers import BatchNorm as BatchNorm
    from anydevice._nn.layers import Chain as Chain
    from anydevice._nn.layers import Concatenate as Concatenate
    from anydevice._nn.layers import Dense as Dense
    from anydevice._nn.layers import Dropout as Dropout
    from anydevice._nn.layers import Embedding as Embedding
    from anydevice._nn.layers import Flatten as Flatten
    from anydevice._nn.layers import GroupNorm as GroupNorm
    from anydevice._nn.layers import Heads as Heads
    from anydevice._nn.layers import Input as Input
    from anydevice._nn.layers import LayerNorm as LayerNorm
    from anydevice._nn.layers import LeakyReLU as LeakyReLU
    from anydevice._nn.layers import PositionEmbedding as PositionEmbedding
    from anydevice._nn.layers import PReLU as PReLU
    from anydevice._nn.layers import Residual as Residual
    from anydevice._nn.layers import RMSNorm as RMSNorm
    from anydevice._nn.layers import TiedEmbedding as TiedEmbedding
    from anydevice._nn.layers import Transpose as Transpose
    from anydevice._nn.losses import binary_cross_entropy as binary_cross_entropy
    from anydevice._nn.losses import cross_entropy as cross_entropy
    from anydevice._nn.losses import fuse_loss as folded  # noqa: F401  a name of 0.2
    from anydevice._nn.losses import fuse_loss as fuse_loss
    from anydevice._nn.losses import huber as huber
    from anydevice._nn.losses import kl_divergence as kl_divergence
    from anydevice._nn.losses import mean_squared_error as mean_squared_error
    from anydevice._nn.model import Model as Model
    from anydevice._nn.model import build as build
    from anydevice._nn.optimizers import EMA as EMA
    from anydevice._nn.optimizers import SGD as SGD
    from anydevice._nn.optimizers import Adam as Adam
    from anydevice._nn.optimizers import AdamW as AdamW
    from anydevice._nn.optimizers import ConstantRate as ConstantRate
    from anydevice._nn.optimizers import CosineRate as CosineRate
    from anydevice._nn.optimizers import Lion as Lion
    from anydevice._nn.optimizers import Muon as Muon
    from anydevice._nn.optimizers import Optimizer as Optimizer
    from anydevice._nn.optimizers import PlateauRate as PlateauRate
    from anydevice._nn.optimizers import RMSprop as RMSprop
    from anydevice._nn.optimizers import Schedule as Schedule
    from anydevice._nn.optimizers import SteppedRate as SteppedRate
    from anydevice._nn.optimizers import WarmUp as WarmUp
    from anydevice._nn.optimizers import clip_gradients as clip_gradients
    from anydevice._nn.optimizers import clip_gradients as clipped  # noqa: F401  a name of 0.2
    from anydevice._nn.optimizers import global_norm as global_norm
    from anydevice._nn.random_choice import folded_seed as folded_seed
    from anydevice._nn.recompute import recompute as recompute
    from anydevice._nn.recurrent import GRU as GRU
    from anydevice._nn.recurrent import LSTM as LSTM
    from anydevice._nn.recurrent import Bidirectional as Bidirectional
    from anydevice._nn.saving import load as load
    from anydevice._nn.saving import register_layer as register_layer
    from anydevice._nn.saving import save as save
    from anydevice._nn.transformer import Attention as Attention
    from anydevice._nn.transformer import GatedMLP as GatedMLP
    from anydevice._nn.transformer import TransformerBlock as TransformerBlock
    from anydevice._train.batches import Batches as Batches
    from anydevice._train.callbacks import Callback as Callback
    from anydevice._train.callbacks import Log as Log
    from anydevice._train.callbacks import TrainingEvent as Moment  # noqa: F401  a name of 0.2
    from anydevice._train.callbacks import TrainingEvent as TrainingEvent
    from anydevice._train.evaluation import Evaluation as Evaluation
    from anydevice._train.evaluation import evaluate as evaluate
    from anydevice._train.evaluation import predict as predict
    from anydevice._train.history import History as History
    from anydevice._train.metrics import accuracy as accuracy
    from anydevice._train.metrics import auc as auc
    from anydevice._train.metrics import f1 as f1
    from anydevice._train.metrics import macro_f1 as macro_f1
    from anydevice._train.metrics import mean_absolute_error as mean_absolute_error
    from anydevice._train.metrics import top_k as top_k
    from anydevice._train.train import Trained as Trained
    from anydevice._train.train import train as train
    from anydevice._train.training import Training as Training

_MODULES = {
    "_nn.convolution": "AvgPool1d AvgPool2d Conv1d Conv2d ConvTranspose2d "
    "GlobalAvgPool GlobalMaxPool MaxPool1d MaxPool2d Upsample",
    "_nn.initializers": "Constant Initializer Normal Scaled Uniform",
    "_nn.layer": "Layer Run",
    "_nn.layers": "Activation BatchNorm Chain Concatenate Dense Dropout Embedding Flatten "
    "GroupNorm Heads Input LayerNorm LeakyReLU PReLU PositionEmbedding RMSNorm Residual "
    "TiedEmbedding Transpose",
    "_nn.losses": "binary_cross_entropy cross_entropy fuse_loss huber kl_divergence "
    "mean_squared_error",
    "_nn.model": "Model build",
    "_nn.optimizers": "Adam AdamW ConstantRate CosineRate EMA Lion Muon Optimizer "
    "PlateauRate RMSprop SGD Schedule SteppedRate WarmUp clip_gradients global_norm",
    "_nn.random_choice": "folded_seed",
    "_nn.recompute": "recompute",
    "_nn.recurrent": "Bidirectional GRU LSTM",
    "_nn.transformer": "Attention GatedMLP TransformerBlock",
    "_nn.saving": "load register_layer save",
    "_train.train": "Trained train",
    "_train.training": "Training",
    "_train.batches": "Batches",
    "_train.callbacks": "Callback Log TrainingEvent",
    "_train.evaluation": "Evaluation evaluate predict",
    "_train.history": "History",
    "_train.metrics": "accuracy auc f1 macro_f1 mean_absolute_error top_k",
}
"""The public names by module. Training and saving are layers above, reached by the same package."""

_DEPRECATED = {"Moment": "TrainingEvent", "clipped": "clip_gradients", "folded": "fuse_loss"}
"""Names of version 0.2, and their new ones; they warn, and go in 0.4."""

_ACTIVATIONS = {"elu", "gelu", "gelu_tanh", "identity", "leaky_relu", "relu"}
_ACTIVATIONS |= {"sigmoid", "silu", "softmax", "softplus", "tanh"}
"""Activations, which have no class; listed here too, because importing them loads all ops."""

_ELSEWHERE = {
    "batchnorm1d": "nn.BatchNorm",
    "batchnorm2d": "nn.BatchNorm",
    "batchnormalization": "nn.BatchNorm",
    "compile": "anydevice.compile",
    "conv2dtranspose": "nn.ConvTranspose2d",
    "dataloader": "nn.Batches",
    "fit": "nn.train",
    "globalaveragepooling1d": 'nn.GlobalAvgPool(over="positions")',
    "globalaveragepooling2d": "nn.GlobalAvgPool",
    "globalmaxpooling1d": 'nn.GlobalMaxPool(over="positions")',
    "globalmaxpooling2d": "nn.GlobalMaxPool",
    "linear": "nn.Dense",
    "mlp": "nn.GatedMLP",
    "mae": "nn.mean_absolute_error",
    "multiheadattention": "nn.Attention",
    "permute": "nn.Transpose",
    "sequential": "nn.build or nn.Chain",
    "transformer": "nn.TransformerBlock",
    "transformerencoderlayer": "nn.TransformerBlock",
}
"""Names of other libraries in lower case without underscores, and ours; losses: `_core/names`."""


def _hint(name: str) -> str:
    """The end of a sentence about a name that other libraries have; empty if it is not known.

    >>> _hint("Linear"), _hint("Quux")
    ('; did you mean nn.Dense?', '')
    >>> _hint("ReLU")
    '; activations are named, as in nn.build(nn.Dense(4, 2), "relu")'
    """
    small = name.lower()
    if small in _ACTIVATIONS:
        return f'; activations are named, as in nn.build(nn.Dense(4, 2), "{small}")'
    from anydevice._core.names import find_name  # only needed for an error

    loss, _ = find_name("loss", name, _MODULES["_nn.losses"].split())
    key = small.replace("_", "")
    meant = _ELSEWHERE.get(key) if loss is None else f"nn.{loss}"
    return "" if meant is None else f"; did you mean {meant}?"


__all__, __getattr__, __dir__ = _lazy_names(__name__, _MODULES, _hint, deprecated=_DEPRECATED)
