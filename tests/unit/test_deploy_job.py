"""The job's command line, and the manifest that uses it: every setting is one that exists."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepinfer.deploy.config import ClusterConfig, load_config
from deepinfer.deploy.job import main, parser

MANIFEST = Path(__file__).parents[2] / "deploy" / "k8s" / "rayjob.yaml"


def parsed(*arguments: str) -> dict[str, Any]:
    return vars(parser().parse_args(arguments))


def test_every_setting_is_a_flag_and_none_is_given_unasked() -> None:
    values = parsed()
    assert set(ClusterConfig.model_fields) <= set(values)
    assert {values[name] for name in ClusterConfig.model_fields} == {None}
    assert (values["nodes"], values["detach"], values["down"]) == ("all", False, False)


def test_flags_have_the_types_that_the_configuration_wants() -> None:
    values = parsed(
        *("--workers", "2", "--max-cache", "3 blocks", "--no-prefix-cache", "--nodes", "4"),
        *("--orphan-grace", "2.5", "--metrics-port", "0", "--token-file", "7", "--reserve", "full"),
    )
    assert values.pop("nodes") == 4
    for name in ("config", "detach", "down"):
        values.pop(name)
    config = load_config(None, values)
    assert (config.workers, config.max_cache, config.prefix_cache) == (2, "3 blocks", False)
    assert (config.orphan_grace, config.metrics_port, config.token_file) == (2.5, 0, "7")


@pytest.mark.parametrize("text", ["0", "-1", "some", "1.5", ""])
def test_an_illegal_number_of_nodes_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--nodes={text}")
    assert f"{text!r}: must be all, or a number from 1" in capsys.readouterr().err


def test_a_bad_setting_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--block-size", "0"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: block_size = 0: ")
    assert "Traceback" not in said


def documents() -> dict[str, Any]:
    loaded = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    return {document["kind"]: document for document in loaded}


def test_the_manifests_entry_point_and_settings_are_legal(tmp_path: Path) -> None:
    made = documents()
    program, module, *arguments = shlex.split(made["RayJob"]["spec"]["entrypoint"])[1:]
    assert (program, module) == ("-m", "deepinfer.deploy.job")
    values = parsed(*arguments)
    computing = made["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert values["nodes"] == sum(group["replicas"] for group in computing)
    file = tmp_path / "cluster.yaml"
    file.write_text(made["ConfigMap"]["data"][values["config"].name])
    config = load_config(file)
    assert not config.loopback, "workers of other pods could not reach the gateways"
    ports = {each["port"] for each in made["Service"]["spec"]["ports"]}
    assert ports == {config.port, config.metrics_fixed_port}


def test_the_manifest_mounts_what_the_settings_name() -> None:
    made = documents()
    spec = made["RayJob"]["spec"]["rayClusterSpec"]
    config = yaml.safe_load(made["ConfigMap"]["data"]["cluster.yaml"])
    templates = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    labelled = [t["template"].get("metadata", {}).get("labels") for t in templates]
    assert labelled == [made["Service"]["spec"]["selector"], None], "clients reach the head only"
    for template in templates:
        [container] = template["template"]["spec"]["containers"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        named = {mount["name"] for mount in container["volumeMounts"]}
        assert named == {volume["name"] for volume in template["template"]["spec"]["volumes"]}
        assert str(Path(config["token_file"]).parent) in mounts
        assert str(Path(config["model"]).parent) in mounts
