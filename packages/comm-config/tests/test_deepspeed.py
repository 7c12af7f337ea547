"""DeepSpeed's documents are read as they are, slips in our keys excepted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_config import CommConfig, ConfigError, deepspeed, load_config
from comm_config.deepspeed import DEEPSPEED_KEYS, is_deepspeed

# From DeepSpeed's tutorials, with what Hugging Face Transformers writes into it.
DOCUMENT: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
    "communication_data_type": "fp32",
    "seq_parallel_communication_data_type": "bf16",
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": False, "debug": False, "prof_ops": ["all_reduce"]},
}


def test_a_whole_document() -> None:
    config = load_config(DOCUMENT, environ={})
    assert config.comms_logger.enabled
    assert config.comms_logger.prof_ops == ["all_reduce"]
    assert config.communication_data_type == "fp32"
    assert config.seq_parallel_communication_data_type == "bf16"
    assert config.training.stage == 3
    assert config.training.reduce_bucket_size is None
    read = ("comms_logger", "communication_data_type", "seq_parallel_communication_data_type", "training")
    assert config.model_copy(update={key: getattr(CommConfig(), key) for key in read}) == CommConfig()


TRAINING = {
    "prescale_gradients": True,
    "gradient_predivide_factor": 2,
    "sparse_gradients": False,
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 1000,
        "overlap_comm": False,
        "offload_optimizer": {"device": "cpu"},
    },
}


@pytest.mark.parametrize("as_file", [False, True])
def test_settings_of_training_are_read_and_name_who_serves_them(
    as_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deepspeed, "_logged", set())
    monkeypatch.setattr(logging.getLogger("comm"), "propagate", True)
    caplog.set_level(logging.INFO, "comm")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(TRAINING))
    for _ in range(2):
        config = load_config(str(file) if as_file else TRAINING, environ={})
    assert config.training.model_dump() == {
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "sparse_gradients": False,
        "stage": 2,
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 1000,
        "overlap_comm": False,
        "model_parallel_plan": {},
    }
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert (
        "served by initialize_module(config, model), and for stage 0 by register_data_parallel_hooks"
        in record.getMessage()
    )
    for key in (*TRAINING, *TRAINING["zero_optimization"]):  # type: ignore[misc]
        assert (key in record.getMessage()) == (key not in ("zero_optimization", "offload_optimizer"))
    # Our own section comes first, and "auto" and null are nothing.
    config = load_config({**TRAINING, "training": {"stage": 1}}, environ={})
    assert (config.training.stage, config.training.overlap_comm) == (1, False)
    nothing = {"prescale_gradients": "auto", "zero_optimization": {"stage": None, "reduce_bucket_size": "auto"}}
    assert load_config(nothing, environ={}) == CommConfig()


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"prescale_gradients": "perhaps"}, "prescale_gradients"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size"),
        ({"zero_optimization": {"stage": 1}, "training": {"stage": 4}}, "training.stage"),
    ],
)
def test_wrong_settings_of_training_are_errors(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^configuration dict: {key}: got"):
        load_config(wrong, environ={})


def test_our_sections_in_it_are_read() -> None:
    config = load_config({**DOCUMENT, "process_group": {"backend": "gloo"}}, environ={})
    assert config.process_group.backend == "gloo"


@pytest.mark.parametrize("key", sorted(DEEPSPEED_KEYS))
def test_each_of_its_keys_marks_a_document(key: str) -> None:
    value = None if key in TRAINING else {}
    assert is_deepspeed({key: value})
    assert load_config({key: value, "somebody_elses": 1}, environ={}) == CommConfig()


@pytest.mark.parametrize("key", sorted(CommConfig.model_fields))
def test_none_of_ours_does(key: str) -> None:
    assert not is_deepspeed({key: {}})


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("comm_logger", "comms_logger"),
        ("commslogger", "comms_logger"),
        ("communication_dtype", "communication_data_type"),
        ("compress_comunication", "compress_communication"),
        ("timeout", "timeouts"),
        ("Network", "network"),
    ],
)
def test_a_slip_in_one_of_ours_is_an_error(slip: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**DOCUMENT, slip: {}}, environ={})
    assert str(caught.value).startswith(f"configuration dict: {slip}: unknown key; did you mean {meant!r}?")


def test_unknown_keys_of_another_document_are_errors() -> None:
    document = {"comms_logger": {"enabled": True}, "somebody_elses": 1}
    with pytest.raises(ConfigError, match=r"^configuration dict: somebody_elses: unknown key \(known here: "):
        load_config(document, environ={})


def test_keys_inside_our_sections_are_checked_in_its_documents_too() -> None:
    with pytest.raises(ConfigError, match=r"comms_logger\.enable: unknown key; did you mean 'enabled'"):
        load_config({**DOCUMENT, "comms_logger": {"enable": True}}, environ={})


@pytest.mark.parametrize(
    "part",
    [
        {"communication_data_type": "auto"},
        {"compress_communication": "auto"},
        {"comms_logger": {"enabled": "auto", "prof_ops": "auto", "verbose": "auto"}},
    ],
)
def test_auto_counts_as_absent(part: dict[str, Any]) -> None:
    config = load_config(part, environ={})
    assert config == CommConfig()
    assert load_config(part, environ={"COMM_COMMS_LOGGER__ENABLED": "auto"}) == CommConfig()


def test_auto_does_not_hide_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match=r"comms_logger\.enable: unknown key"):
        load_config({"comms_logger": {"enable": "auto"}}, environ={})


def test_keys_that_are_no_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected keys that are strings"):
        load_config({"bf16": {}, 7: {}}, environ={})  # type: ignore[dict-item]


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=3)


@given(st.dictionaries(st.sampled_from(sorted(DEEPSPEED_KEYS - {*TRAINING})), JSON, min_size=1), st.booleans())
def test_whatever_its_sections_hold_is_ignored(document: dict[str, Any], enabled: bool) -> None:
    config = load_config({**document, "comms_logger": {"enabled": enabled}}, environ={})
    assert config.comms_logger.enabled is enabled
