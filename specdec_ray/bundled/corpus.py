"""Text and tokenizer of the bundled pair: Python's documentation and standard library."""

import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Debian's python3.11-doc; any folder of reStructuredText sources does.
DOCUMENTATION = Path("/usr/share/doc/python3.11/html/_sources")
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
SKIPPED_PARTS = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "pydoc_data"}
MAX_FILE_BYTES = 250_000  # larger files are tables rather than language

BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'].capitalize() }}\n\n{{ message['content'] }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant\n\n{% endif %}"
)


def read_documents(roots: Sequence[Path]) -> list[str]:
    """Texts of all `.rst`, `.txt` and `.py` files below the roots, in a fixed shuffled order.

    Raises:
        FileNotFoundError: a root has no such file.
    """
    documents = []
    for root in roots:
        found = [path.read_text(errors="ignore") for path in _files(root)]
        if not found:
            raise FileNotFoundError(f"no .rst, .txt or .py file below {root}")
        documents += found
    random.Random(0).shuffle(documents)
    return documents


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that any text can be encoded."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> npt.NDArray[np.uint16]:
    """One stream of ids; every document starts with BOS and ends with EOS."""
    ids: list[int] = []
    for document in documents:
        ids.append(tokenizer.bos_token_id)
        ids += tokenizer.backend_tokenizer.encode(document).ids
        ids.append(tokenizer.eos_token_id)
    return np.array(ids, dtype=np.uint16)


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if (
            path.suffix in {".rst", ".txt", ".py"}
            and not SKIPPED_PARTS & set(path.relative_to(root).parts)
            and path.is_file()
            and 500 < path.stat().st_size < MAX_FILE_BYTES
        ):
            yield path
