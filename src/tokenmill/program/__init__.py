"""A model is a program of coarse ops: the op table, two builders, and the Program they make."""

from .builder import Builder, EagerBuilder, RecordingBuilder
from .ops import OPS
from .program import KVLayer, Op, Program, StepInputs, StepShape, Value
from .weight import LayerWeights, Weight, Weights

__all__ = [
    "OPS",
    "Builder",
    "EagerBuilder",
    "KVLayer",
    "LayerWeights",
    "Op",
    "Program",
    "RecordingBuilder",
    "StepInputs",
    "StepShape",
    "Value",
    "Weight",
    "Weights",
]
