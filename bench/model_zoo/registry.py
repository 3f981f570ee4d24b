"""The trainable classes of the installed transformers, by the library's own registries."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

# The registries of classes with a loss, the most used first: a class is one of the first kind that lists it.
KINDS = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "MASKED_LM",
    "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "IMAGE_SEGMENTATION", "INSTANCE_SEGMENTATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "MULTIMODAL_LM", "PRETRAINING", "VISUAL_QUESTION_ANSWERING",
    "DOCUMENT_QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING", "VIDEO_CLASSIFICATION", "MASKED_IMAGE_MODELING",
    "CAUSAL_IMAGE_MODELING", "IMAGE_TO_IMAGE", "DEPTH_ESTIMATION", "IMAGE_MATTING", "NORMAL_ESTIMATION",
    "POINTMAP_ESTIMATION", "POSE_ESTIMATION", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING",
    "ZERO_SHOT_OBJECT_DETECTION", "RNNT", "TDT", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "AUDIO_XVECTOR",
    "AUDIO_FRAME_CLASSIFICATION", "TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION",
    "QUESTION_ANSWERING", "TOKEN_CLASSIFICATION", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION",
)  # fmt: skip
# Arguments of forward without which no loss is computed. `labels` is the usual one.
LABELS = (
    "labels", "start_positions", "return_loss", "mask_labels", "future_values", "target_values", "bool_masked_pos",
    "audio_labels", "spectrogram_labels", "next_sentence_label", "sampled_negative_indices",
)  # fmt: skip


@dataclass(frozen=True)
class ModelClass:
    """A class of transformers: the type of its configuration, and the registry that lists it."""

    name: str
    family: str
    kind: str

    library = "transformers"

    @property
    def cls(self) -> Any:
        return getattr(transformers, self.name)

    @property
    def arguments(self) -> list[str]:
        return [name for name in inspect.signature(self.cls.forward).parameters if name not in ("self", "kwargs")]

    @property
    def has_loss(self) -> bool:
        return not set(LABELS).isdisjoint(self.arguments)


def model_classes(only: str = "") -> Iterator[ModelClass]:
    """Every class that may have a loss, by name: a look at its arguments imports its module. `only`: expressions, split
    at commas, one of which is found in its name, family or kind."""
    wanted = [re.compile(word, re.IGNORECASE) for word in only.split(",") if word]
    seen = set()
    for kind in KINDS:
        for family, names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).items():
            for name in names if isinstance(names, (list, tuple)) else [names]:
                model = ModelClass(name, family, kind.lower())
                if name in seen:
                    continue
                seen.add(name)
                if not wanted or any(word.search(f"{name} {family} {model.kind}") for word in wanted):
                    yield model
