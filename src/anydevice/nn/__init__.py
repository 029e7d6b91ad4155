"""Models built on `anydevice.ops`: layers are plain descriptions, parameters are trees of arrays.

>>> from anydevice import nn
>>> model = nn.build(nn.Dense(64, 128), "relu", nn.Dense(128, 10), device="cpu")
>>> model.output_shape, model.parameter_count
((10,), 9610)

The same model runs, with the same parameters for the same seed, on every engine. Every name loads
when it is first used.
"""

from __future__ import annotations

from anydevice.core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice.nn._recompute import recompute as recompute
    from anydevice.nn.convolution import AvgPool2d as AvgPool2d
    from anydevice.nn.convolution import Conv1d as Conv1d
    from anydevice.nn.convolution import Conv2d as Conv2d
    from anydevice.nn.convolution import ConvTranspose2d as ConvTranspose2d
    from anydevice.nn.convolution import GlobalAvgPool as GlobalAvgPool
    from anydevice.nn.convolution import GlobalMaxPool as GlobalMaxPool
    from anydevice.nn.convolution import MaxPool2d as MaxPool2d
    from anydevice.nn.initializers import Constant as Constant
    from anydevice.nn.initializers import Initializer as Initializer
    from anydevice.nn.initializers import Normal as Normal
    from anydevice.nn.initializers import Scaled as Scaled
    from anydevice.nn.initializers import Uniform as Uniform
    from anydevice.nn.layer import Layer as Layer
    from anydevice.nn.layer import Run as Run
    from anydevice.nn.layers import Activation as Activation
    from anydevice.nn.layers import BatchNorm as BatchNorm
    from anydevice.nn.layers import Chain as Chain
    from anydevice.nn.layers import Dense as Dense
    from anydevice.nn.layers import Dropout as Dropout
    from anydevice.nn.layers import Embedding as Embedding
    from anydevice.nn.layers import Flatten as Flatten
    from anydevice.nn.layers import LayerNorm as LayerNorm
    from anydevice.nn.layers import LeakyReLU as LeakyReLU
    from anydevice.nn.layers import PositionEmbedding as PositionEmbedding
    from anydevice.nn.layers import Residual as Residual
    from anydevice.nn.layers import RMSNorm as RMSNorm
    from anydevice.nn.layers import TiedEmbedding as TiedEmbedding
    from anydevice.nn.losses import binary_cross_entropy as binary_cross_entropy
    from anydevice.nn.losses import cross_entropy as cross_entropy
    from anydevice.nn.losses import folded as folded
    from anydevice.nn.losses import mean_squared_error as mean_squared_error
    from anydevice.nn.model import Model as Model
    from anydevice.nn.model import build as build
    from anydevice.nn.optimizers import SGD as SGD
    from anydevice.nn.optimizers import Adam as Adam
    from anydevice.nn.optimizers import AdamW as AdamW
    from anydevice.nn.optimizers import ConstantRate as ConstantRate
    from anydevice.nn.optimizers import CosineRate as CosineRate
    from anydevice.nn.optimizers import Lion as Lion
    from anydevice.nn.optimizers import Optimizer as Optimizer
    from anydevice.nn.optimizers import Schedule as Schedule
    from anydevice.nn.optimizers import SteppedRate as SteppedRate
    from anydevice.nn.optimizers import WarmUp as WarmUp
    from anydevice.nn.optimizers import clipped as clipped
    from anydevice.nn.optimizers import global_norm as global_norm
    from anydevice.nn.random_choice import folded_seed as folded_seed
    from anydevice.nn.recurrent import GRU as GRU
    from anydevice.nn.recurrent import LSTM as LSTM
    from anydevice.nn.transformer import Attention as Attention
    from anydevice.nn.transformer import GatedMLP as GatedMLP
    from anydevice.nn.transformer import TransformerBlock as TransformerBlock
    from anydevice.saving.models import load as load
    from anydevice.saving.models import register_layer as register_layer
    from anydevice.saving.models import save as save
    from anydevice.training._train import Trained as Trained
    from anydevice.training._train import train as train
    from anydevice.training._training import Training as Training
    from anydevice.training.batches import Batches as Batches
    from anydevice.training.callbacks import Callback as Callback
    from anydevice.training.callbacks import Log as Log
    from anydevice.training.callbacks import Moment as Moment
    from anydevice.training.evaluation import Evaluation as Evaluation
    from anydevice.training.evaluation import evaluate as evaluate
    from anydevice.training.evaluation import predict as predict
    from anydevice.training.history import History as History
    from anydevice.training.metrics import accuracy as accuracy
    from anydevice.training.metrics import auc as auc
    from anydevice.training.metrics import f1 as f1
    from anydevice.training.metrics import macro_f1 as macro_f1
    from anydevice.training.metrics import mean_absolute_error as mean_absolute_error
    from anydevice.training.metrics import top_k as top_k

_MODULES = {
    "nn.convolution": "AvgPool2d Conv1d Conv2d ConvTranspose2d "
    "GlobalAvgPool GlobalMaxPool MaxPool2d",
    "nn.initializers": "Constant Initializer Normal Scaled Uniform",
    "nn.layer": "Layer Run",
    "nn.layers": "Activation BatchNorm Chain Dense Dropout Embedding "
    "Flatten LayerNorm LeakyReLU PositionEmbedding RMSNorm Residual TiedEmbedding",
    "nn.losses": "binary_cross_entropy cross_entropy folded mean_squared_error",
    "nn.model": "Model build",
    "nn.optimizers": "Adam AdamW ConstantRate CosineRate Lion Optimizer "
    "SGD Schedule SteppedRate WarmUp clipped global_norm",
    "nn.random_choice": "folded_seed",
    "nn._recompute": "recompute",
    "nn.recurrent": "GRU LSTM",
    "nn.transformer": "Attention GatedMLP TransformerBlock",
    "saving.models": "load register_layer save",
    "training._train": "Trained train",
    "training._training": "Training",
    "training.batches": "Batches",
    "training.callbacks": "Callback Log Moment",
    "training.evaluation": "Evaluation evaluate predict",
    "training.history": "History",
    "training.metrics": "accuracy auc f1 macro_f1 mean_absolute_error top_k",
}
"""The public names by module. Training and saving are layers above, reached by the same package."""

_ACTIVATIONS = {"gelu", "gelu_tanh", "identity", "leaky_relu", "relu"}
_ACTIVATIONS |= {"sigmoid", "silu", "softmax", "tanh"}
"""Activations, which have no class; listed here too, because importing them loads all ops."""

_ELSEWHERE = {
    "batchnorm1d": "nn.BatchNorm",
    "batchnorm2d": "nn.BatchNorm",
    "batchnormalization": "nn.BatchNorm",
    "bce": "nn.binary_cross_entropy",
    "bceloss": "nn.binary_cross_entropy",
    "bcewithlogitsloss": "nn.binary_cross_entropy",
    "compile": "anydevice.compile",
    "conv2dtranspose": "nn.ConvTranspose2d",
    "crossentropy": "nn.cross_entropy",
    "crossentropyloss": "nn.cross_entropy",
    "dataloader": "nn.Batches",
    "fit": "nn.train",
    "globalaveragepooling1d": "nn.GlobalAvgPool",
    "globalaveragepooling2d": "nn.GlobalAvgPool",
    "globalmaxpooling1d": "nn.GlobalMaxPool",
    "globalmaxpooling2d": "nn.GlobalMaxPool",
    "linear": "nn.Dense",
    "mlp": "nn.GatedMLP",
    "mae": "nn.mean_absolute_error",
    "mse": "nn.mean_squared_error",
    "mseloss": "nn.mean_squared_error",
    "multiheadattention": "nn.Attention",
    "sequential": "nn.build or nn.Chain",
    "transformer": "nn.TransformerBlock",
    "transformerencoderlayer": "nn.TransformerBlock",
}
"""Names of other libraries, in lower case without underscores, and ours for them."""


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
    meant = _ELSEWHERE.get(small.replace("_", ""))
    return "" if meant is None else f"; did you mean {meant}?"


__all__, __getattr__, __dir__ = _lazy_names(__name__, _MODULES, _hint)
