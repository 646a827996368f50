"""A target with something to learn, and small settings: what the trainer's tests share."""

from pathlib import Path

import numpy as np
import torch

from eaglecli.models.loader import LoadedTarget, load_target
from eaglecli.training.documents import Document, DocumentSet
from eaglecli.training.settings import TrainSettings
from tests.fixtures import END_OF_TURN_ID, VOCAB_SIZE, write_e3

SEQUENCE_LENGTH = 64
TAPS = (2, 4, 5)


def load_e3(folder: Path) -> LoadedTarget:
    return load_target(write_e3(folder).target_dir, torch.float32, "cpu", SEQUENCE_LENGTH * 2)


def random_documents(count: int, seed: int = 0) -> list[Document]:
    """Prompts of 3 to 8 tokens, answers of 5 to 20 with an end token."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        prompt = random.integers(0, 256, random.integers(3, 9))
        answer = np.append(random.integers(0, VOCAB_SIZE - 80, random.integers(5, 21)), END_OF_TURN_ID)
        documents.append(Document(np.concatenate([prompt, answer]).astype(np.int32), len(prompt)))
    return documents


def document_set(count: int, seed: int = 0) -> DocumentSet:
    return DocumentSet(training=random_documents(count, seed), held_out=random_documents(2, seed + 1))


def small_settings(**changes: object) -> TrainSettings:
    values = {
        "sequence_length": SEQUENCE_LENGTH,
        "draft_vocab_size": 96,
        "num_unroll_steps": 3,
        "batch_size": 2,
        "num_steps": 4,
        "warmup_steps": 2,
        "held_out": 2,
        "held_out_new_tokens": 16,
    }
    return TrainSettings(**{**values, **changes})
