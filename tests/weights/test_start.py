"""What opening a model that is at hand costs: no library that only fetching needs, no copy of the weights."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from tokenmill.weights.loader import open_checkpoint


def test_a_model_at_hand_needs_no_library_for_fetching(smollm2_path):
    code = (
        "import sys; from tokenmill.weights import sources; sources.resolve('smollm2-135m-instruct');"
        f"sources.resolve({str(smollm2_path)!r});"
        "print(*{'ssl', 'http.client', 'zipfile', 'packaging', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_matrices_of_an_opened_file_are_views_of_it(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    whole = np.frombuffer(checkpoint.mapped[0].data, np.uint8)
    matrices = [weight for weight in checkpoint.tensors.values() if len(weight.shape) == 2]
    assert len(matrices) == 211
    assert all(weight.mapped and np.shares_memory(weight.data, whole) for weight in matrices)


def test_digest_and_weights_are_the_same_after_their_memory_was_let_go(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    data = checkpoint.tensors["layers.3.q_proj"].data
    before = bytes(data[:4096])
    digest = checkpoint.digest
    checkpoint.release()
    assert bytes(data[:4096]) == before
    assert open_checkpoint(smollm2_path).digest == digest
