"""A model is a program of coarse ops: the op table, two builders, and the Program they make."""

from .builder import Builder, EagerBuilder, Heads, RecordingBuilder, Rope
from .ops import OPS
from .program import KVLayer, Op, Program, StepInputs, StepShape, Value
from .weight import LayerWeights, Weight, Weights

__all__ = [
    "OPS",
    "Builder",
    "EagerBuilder",
    "Heads",
    "KVLayer",
    "LayerWeights",
    "Op",
    "Program",
    "RecordingBuilder",
    "Rope",
    "StepInputs",
    "StepShape",
    "Value",
    "Weight",
    "Weights",
]
