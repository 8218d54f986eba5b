"""A Hugging Face folder comes to Strata and leaves it by docs/frameworks/adopt.md, with the real transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_adopt_page import block, shell
from tests.docs.test_training_page import run

transformers: Any = pytest.importorskip("transformers")
torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

BEFORE = """
import torch
import strata
loader = torch.utils.data.DataLoader(torch.randint(0, 64, (32, 8)), batch_size=4)
"""
TRAINS = """
for batch in run.steps():
    model(input_ids=batch, labels=batch).loss.backward()
    opt.step()
    opt.zero_grad()
run.close()
torch.save(model.state_dict(), "trained.pt")
"""


@pytest.mark.parametrize(("shard", "files"), [("5GB", 1), ("20KB", 6)])
def test_a_model_of_transformers_comes_from_a_folder_and_leaves_into_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str, files: int
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=shard)
    assert len(list((tmp_path / "hf").glob("model*.safetensors"))) == files
    run(BEFORE + block("from_pretrained(") + TRAINS, tmp_path)

    shell(block("cp hf/config.json"), tmp_path)
    exported, names = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(names.values()), "no name is missing, unexpected or of another shape"
    trained = torch.load(tmp_path / "trained.pt")
    found = exported.state_dict()
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], weight) for name, weight in trained.items())
    assert exported.lm_head.weight is exported.model.embed_tokens.weight, "still tied"
    assert not torch.equal(trained["lm_head.weight"], theirs.state_dict()["lm_head.weight"]), "it trained"
