"""Configs: typed, refused with the nearest name, and read without MPI or torch."""

import json
import subprocess
import sys

import pytest

from hpctrain.config.describe import describe_options
from hpctrain.config.read import config_from, read_config, to_dict, tomllib
from hpctrain.config.records import Config, Pipeline
from hpctrain.errors import ConfigError
from hpctrain.train.recipe import make_zero
from hpctrain.zero.offload import Offload
from hpctrain.zero.options import Zero


def write(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_file_and_settings_become_typed_records(tmp_path):
    path = write(tmp_path, '[run]\nsteps = 7\n[optimizer]\nlr = 1\n[batch]\nglobal = 8\n[mesh]\ntensor = 2\ndata = 4\n')
    config = read_config(path, ["run.steps=9", "run.out=runs/x", 'model.kind="mlp"', "data.tail = keep"])
    assert config.run.steps == 9
    assert config.run.out == "runs/x"
    assert config.model.kind == "mlp"
    assert config.data.tail == "keep"
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.batch.global_ == 8
    assert config.mesh.mesh(8).axes == ("tensor", "data")  # the user's order


def test_a_section_within_a_section(tmp_path):
    path = write(tmp_path, "[zero]\nstage = 1\n[zero.offload]\nstates = 'disk'\ndirectory = '/d'\n")
    config = read_config(path, ["zero.offload.directory=/e", "zero.offload.delay=true", "zero.stage=2"])
    assert (config.zero.stage, config.offload.states, config.offload.directory, config.offload.delay) == (
        2, "disk", "/e", True)
    assert make_zero(config).offload == Offload(states="disk", directory="/e", delay=True)
    assert make_zero(Config()) == Zero()


def test_layers_of_stages_are_a_word_or_a_list(tmp_path):
    path = write(tmp_path, "[mesh]\npipeline = 2\n[pipeline]\nschedule = 'gpipe'\nlayers = [3, 0]\nlimit = 2\n")
    assert read_config(path).pipeline == Pipeline("gpipe", (3, 0), limit=2.0)
    assert read_config(path, ["pipeline.layers=time"]).pipeline.layers == "time"
    assert read_config(path, ["pipeline.layers=[1,2]"]).pipeline.layers == (1, 2)
    config = read_config(path)
    assert config_from(json.loads(json.dumps(to_dict(config)))) == config


def test_config_survives_json():
    config = config_from({"batch": {"global": 24}, "mesh": {"tensor": 2, "data": 3}, "run": {"out": "x"},
                          "zero": {"stage": 2, "offload": {"gradients": "host"}}})
    assert config.offload.gradients == "host"
    assert config_from(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("table, words", [
    ({"runn": {}}, ["[runn]", "did you mean 'run'?"]),
    ({"run": {"step": 1}}, ["run.step", "did you mean 'steps'?"]),
    ({"run": {"lr": 1}}, ["run.lr", "did you mean 'optimizer.lr'?"]),
    ({"run": {"steps": "x"}}, ["run.steps = 'x'", "an integer"]),
    ({"run": {"steps": True}}, ["run.steps = True", "an integer"]),
    ({"run": {"steps": 1.0}}, ["run.steps = 1.0", "an integer"]),
    ({"run": {"steps": 0}}, ["run.steps = 0", "at least 1"]),
    ({"model": {"tied": 1}}, ["model.tied = 1", "true or false"]),
    ({"optimizer": {"beta1": 1.5}}, ["optimizer.beta1 = 1.5", "at most 1"]),
    ({"optimizer": {"lr": float("nan")}}, ["optimizer.lr", "finite"]),
    ({"model": {"kind": "gtp"}}, ["model.kind = 'gtp'", "did you mean 'gpt'?", "'mlp'"]),
    ({"model": {"width": 10, "heads": 4}}, ["model.heads = 4", "model.width = 10"]),
    ({"model": {"width": 12, "heads": 4}}, ["must be even", "learned"]),
    ({"data": {"length": 200}}, ["data.length = 200", "model.context = 128"]),
    ({"batch": {"accumulation": 0}}, ["batch.accumulation = 0", "at least 1"]),
    ({"mesh": {"dat": 2}}, ["'dat'", "did you mean 'data'?"]),
    ({"mesh": {"dat": "x"}}, ["'dat'", "did you mean 'data'?"]),
    ({"mesh": {"tensor": 0}}, ["mesh.tensor = 0", "at least 1"]),
    ({"mesh": {"data": True}}, ["mesh.data = True"]),
    ({"run": 3}, ["[run]", "3"]),
    ({"zeros": {"stage": 1}}, ["[zeros]", "unknown", "did you mean 'zero'?"]),
    ({"zero": {"stage": 4}}, ["zero.stage = 4", "0, 1, 2 or 3"]),
    ({"zero": {"offload": {"states": "dis"}}}, ["zero.offload.states = 'dis'", "did you mean 'disk'?"]),
    ({"zero": {"offload": 3}}, ["[zero.offload]", "3"]),
    ({"zero": {"directory": "/d"}}, ["zero.directory", "did you mean 'zero.offload.directory'?"]),
    ({"precision": {"compute": "float8"}}, ["precision.compute = 'float8'", "'bfloat16'"]),
    ({"zero": {"share": "all"}}, ["zero.share = 'all'", "'auto', 'node' or 'none'"]),
    ({"amp": {}}, ["[amp]", "unknown"]),
    ({"pipeline": {"schedule": "dualpip"}}, ["pipeline.schedule = 'dualpip'", "'dualpipe'", "'1f1b'"]),
    ({"pipeline": {"stages": 2}}, ["pipeline.stages", "'layers'"]),
    ({"pipeline": {"layers": "even"}}, ["pipeline.layers = 'even'", "'uniform'", "or a list of integers"]),
    ({"pipeline": {"layers": 3}}, ["pipeline.layers = 3", "a string, or a list of integers"]),
    ({"pipeline": {"layers": [1, -1]}}, ["pipeline.layers = [1, -1]", "-1 must be an integer of at least 0"]),
    ({"pipeline": {"layers": [1, True]}}, ["pipeline.layers = [1, True]", "True must be an integer"]),
    ({"pipeline": {"chunks": [2]}}, ["pipeline.chunks = [2]", "an integer"]),
    ({"pipeline": {"trace_step": 3}}, ["pipeline.trace_step = 3", "needs pipeline.trace"]),
    ({"pipeline": {"trace": "a", "trace_step": 101}}, ["pipeline.trace_step = 101", "at most run.steps = 100"]),
])
def test_wrong_words_are_refused_and_named(table, words):
    with pytest.raises(ConfigError) as caught:
        config_from(table)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("setting", ["run.steps", "steps=3", "=3", "run.=3", ".steps=3"])
def test_settings_need_section_key_and_value(tmp_path, setting):
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        read_config(write(tmp_path, ""), [setting])


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not a TOML file"):
        read_config(write(tmp_path, "[run"))


def test_an_open_data_axis_takes_the_ranks_that_remain():
    assert config_from({}).mesh.mesh(3).length("data") == 3
    assert config_from({"mesh": {"data": 0, "tensor": 2}}).mesh.mesh(6).length("data") == 3
    assert config_from({"mesh": {"tensor": 2}}).mesh.mesh(None).size == 2
    with pytest.raises(ConfigError, match="multiple of 2"):
        config_from({"mesh": {"tensor": 2}}).mesh.mesh(3)
    with pytest.raises(ConfigError, match="the job has 3 ranks"):
        config_from({"mesh": {"data": 2}}).mesh.mesh(3)


def test_described_options_are_a_config_with_all_defaults():
    assert config_from(tomllib.loads(describe_options())) == Config()


def test_legal_numbers_are_described_as_numbers():
    assert "One of: 0, 1, 2, 3." in describe_options() and 'One of: "adamw", ' in describe_options()


def test_configs_load_neither_mpi_nor_arrays():
    code = ("import sys\nfrom hpctrain.config.read import config_from\nconfig_from({})\n"
            "print([m for m in ('torch', 'mpi4py', 'h5py', 'numpy') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
