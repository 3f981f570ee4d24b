"""A tiny model for each kind of adapter that PEFT has, and for variants of them; and what becomes of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.config import (
    BdLoraConfig,
    CordaConfig,
    EvaConfig,
    KasaConfig,
    LoraGAConfig,
    MontecloraConfig,
    VeloraConfig,
)

from penstock.tests.compiler.job.adapters.adapted_models import IDS, llama, moe

LAYERS = ["q_proj", "v_proj"]
TASK = {"task_type": "CAUSAL_LM"}
TOKENS = {**TASK, "num_virtual_tokens": 3}


def adapter(kind: str, *, model: Callable[[], Any] = llama, **options: Any) -> Callable[[Path], Any]:
    def make(directory: Path) -> Any:
        given = {"target_modules": LAYERS, **options} if "num_virtual_tokens" not in options else options
        given = {name: value for name, value in given.items() if value is not ...}
        config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](**given)
        base = model()
        torch.manual_seed(1)
        return shake(peft.get_peft_model(base, config))

    return make


def shake(model: Any) -> Any:
    """Add noise to all that is trained: most kinds begin with a change of nothing, which hides mistakes."""
    torch.manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.02 * torch.randn_like(param))
    return model.train()


def cpt(directory: Path) -> Any:
    return adapter(
        "CPT", **TASK, target_modules=..., cpt_token_ids=[3, 4, 5, 6], cpt_mask=[1, 1, 1, 1],
        cpt_tokens_type_mask=[1, 2, 3, 4], opt_weighted_loss_type="decay", opt_loss_decay_factor=0.95,
    )(directory)  # fmt: skip


def eva(directory: Path) -> Any:
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights="eva", eva_config=EvaConfig(rho=1.0))
    )
    peft.initialize_lora_eva_weights(model, [{"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}])
    return shake(model)


def corda(directory: Path) -> Any:
    from peft.tuners.lora.corda import preprocess_corda

    model = llama()
    config = peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights="corda", corda_config=CordaConfig())
    preprocess_corda(model, config, run_model=lambda: model(IDS[:1]))
    return shake(peft.get_peft_model(model, config))


def lora_ga(directory: Path) -> Any:
    from peft.tuners.lora.loraga import preprocess_loraga

    model = llama()
    config = peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    preprocess_loraga(model, config, lambda: model(input_ids=IDS, labels=IDS).loss.backward())
    return shake(peft.get_peft_model(model, config))


def write_experts(directory: Path, count: int = 2) -> list[str]:
    """Write adapters for the kinds that mix several of them."""
    found = []
    for number in range(count):
        place = directory / f"expert{number}"
        if not place.is_dir():
            model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=LAYERS, **TASK))
            torch.manual_seed(number)
            with torch.no_grad():
                for param in model.parameters():
                    if param.requires_grad:
                        param.normal_(0, 0.05)
            model.save_pretrained(place)
        found.append(str(place))
    return found


def xlora(directory: Path, **options: Any) -> Any:
    paths = write_experts(directory)
    config = peft.XLoraConfig(
        **TASK, hidden_size=32, xlora_depth=1, xlora_dropout_p=0.0, adapters={str(i): p for i, p in enumerate(paths)},
        **options,
    )  # fmt: skip
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), config)


def arrow(directory: Path) -> Any:
    from peft import ArrowConfig, create_arrow_model

    torch.manual_seed(1)
    return create_arrow_model(llama(), write_experts(directory), ArrowConfig(top_k=1))


def mix_adapters(directory: Path) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]), mixed=True)
    model.add_adapter("other", peft.LoHaConfig(r=4, target_modules=["v_proj"]))
    model.set_adapter(["default", "other"])
    return shake(model)


ADALORA = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 2, "deltaT": 1, "total_step": 10}
LORA: dict[str, Callable[[Path], Any]] = {
    name: adapter("LORA", **{"r": 4, **options})
    for name, options in {
        "lora": {},
        "rslora": {"use_rslora": True},
        "dora": {"use_dora": True},
        "pissa": {"init_lora_weights": "pissa"},
        "pissa by steps": {"init_lora_weights": "pissa_niter_4"},
        "olora": {"init_lora_weights": "olora"},
        "orthogonal": {"init_lora_weights": "orthogonal"},
        "mica": {"init_lora_weights": "mica"},
        "qalora": {"use_qalora": True, "qalora_group_size": 8},
        "lora bias": {"lora_bias": True, "model": lambda: llama(attention_bias=True)},
        "biases": {"bias": "all", "model": lambda: llama(attention_bias=True)},
        "rank pattern": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "parameters": {"model": lambda: moe("mixtral"), "target_modules": [],
                       "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        "linear parameters": {"target_modules": [], "target_parameters": ["q_proj.weight", "v_proj.weight"]},
        "replicated layers": {"layer_replication": [[0, 2], [1, 2]]},
        "tokens": {"trainable_token_indices": [1, 3, 5]},
        "tied tokens": {"trainable_token_indices": [1, 3, 5], "model": lambda: llama(tie_word_embeddings=True)},
        "head": {"modules_to_save": ["lm_head"]},
        "alora": {"alora_invocation_tokens": [3, 4], **TASK},
        "velora": {"velora_config": VeloraConfig(num_groups=4)},
        "velora random": {"velora_config": VeloraConfig(num_groups=4, init_type="random")},
        "monteclora": {"monteclora_config": MontecloraConfig()},
        "bdlora": {"use_bdlora": BdLoraConfig(target_modules_bd_b=LAYERS, nblocks=2)},
        "kasa": {"kasa_config": KasaConfig()},
        "lora dropout": {"lora_dropout": 0.2},
    }.items()
}  # fmt: skip
LORA |= {"eva": eva, "corda": corda, "lora_ga": lora_ga, "arrow": arrow, "mixed": mix_adapters}

KINDS: dict[str, Callable[[Path], Any]] = {
    "ADALORA": adapter("ADALORA", **ADALORA),
    "ADAMSS": adapter("ADAMSS", r=8, num_subspaces=2),
    "ADAPTION_PROMPT": adapter("ADAPTION_PROMPT", **TASK, target_modules=..., adapter_len=4, adapter_layers=1),
    "BEFT": adapter("BEFT", target_modules=["v_proj"]),
    "BOFT": adapter("BOFT", boft_block_size=4),
    "C3A": adapter("C3A", block_size=8),
    "CARTRIDGE": adapter("CARTRIDGE", **TOKENS),
    "CPT": cpt,
    "DEFT": adapter("DEFT", r=4),
    "DELORA": adapter("DELORA", r=4),
    "FOURIERFT": adapter("FOURIERFT", n_frequency=20),
    "FROD": adapter("FROD", progressbar=False),
    "GLORA": adapter("GLORA", r=4),
    "GRALORA": adapter("GRALORA", r=4),
    "HIRA": adapter("HIRA", r=4),
    "HRA": adapter("HRA", r=4),
    "IA3": adapter("IA3", feedforward_modules=[]),
    "LILY": adapter("LILY", r=4),
    "LN_TUNING": adapter("LN_TUNING", target_modules=["norm"]),
    "LOHA": adapter("LOHA", r=4),
    "LOKR": adapter("LOKR", r=4),
    "LORA": LORA["lora"],
    "MISS": adapter("MISS", r=4),
    "MULTITASK_PROMPT_TUNING": adapter("MULTITASK_PROMPT_TUNING", **TOKENS, num_tasks=2),
    "OFT": adapter("OFT", oft_block_size=8),
    "OSF": adapter("OSF", effective_rank=4),
    "PEANUT": adapter("PEANUT", r=4),
    "POLY": adapter("POLY", **TASK, r=4, n_tasks=2, n_skills=2),
    "PREFIX_TUNING": adapter("PREFIX_TUNING", **TOKENS),
    "PROMPT_TUNING": adapter("PROMPT_TUNING", **TOKENS),
    "PSOFT": adapter("PSOFT", r=4),
    "PVERA": adapter("PVERA", r=4),
    "P_TUNING": adapter("P_TUNING", **TOKENS, encoder_hidden_size=16),
    "RANDLORA": adapter("RANDLORA", r=4),
    "ROAD": adapter("ROAD", group_size=4),
    "SHADOW": adapter("SHADOW", **TASK, target_modules=..., r=4, shadow_dropout=0.0),
    "SHIRA": adapter("SHIRA", r=2, random_seed=3),
    "SUPERTUNING": adapter("SUPERTUNING", sparsity=0.9),
    "TINYLORA": adapter("TINYLORA", r=2, u=8),
    "TRAINABLE_TOKENS": adapter("TRAINABLE_TOKENS", target_modules=..., token_indices=[1, 3, 5]),
    "UNILORA": adapter("UNILORA", r=4, theta_d_length=32),
    "VBLORA": adapter("VBLORA", r=4, num_vectors=8, vector_length=8),
    "VERA": adapter("VERA", r=4),
    "WAVEFT": adapter("WAVEFT", n_frequency=20),
    "XLORA": xlora,
}
VARIANTS: dict[str, Callable[[Path], Any]] = {
    "oft by cayley": adapter("OFT", oft_block_size=8, use_cayley_neumann=False),
    "oft shared": adapter("OFT", oft_block_size=8, block_share=True),
    "coft": adapter("OFT", oft_block_size=8, coft=True),
    "boft by factors": adapter("BOFT", boft_block_size=4, boft_n_butterfly_factor=2),
    "hra gram-schmidt": adapter("HRA", r=4, apply_GS=True),
    "ia3 feedforward": adapter("IA3", target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lokr decomposed": adapter("LOKR", r=2, decompose_both=True, decompose_factor=4),
    "loha dropout": adapter("LOHA", r=4, rank_dropout=0.2),
    "loha module dropout": adapter("LOHA", r=4, module_dropout=0.2),
    "lokr module dropout": adapter("LOKR", r=4, module_dropout=0.2),
    "boft dropout": adapter("BOFT", boft_block_size=4, boft_dropout=0.2),
    "p-tuning lstm": adapter("P_TUNING", **TOKENS, encoder_hidden_size=16, encoder_reparameterization_type="LSTM"),
    "prefix projection": adapter("PREFIX_TUNING", **TOKENS, prefix_projection=True, encoder_hidden_size=16),
    "road 4": adapter("ROAD", group_size=4, variant="road_4"),
    "miss bat": adapter("MISS", r=4, init_weights="bat"),
    "vblora top-k saved": adapter("VBLORA", r=4, num_vectors=8, vector_length=8, save_only_topk_weights=True),
    "randlora sparse": adapter("RANDLORA", r=4, sparse=True),
    "xlora trained": functools.partial(xlora, use_trainable_adapters=True),
    "xlora by layers": functools.partial(xlora, layerwise_scalings=True, top_k_lora=1),
    "adamss asa": adapter("ADAMSS", r=8, num_subspaces=2, use_asa=True),
    "gralora hybrid": adapter("GRALORA", r=4, hybrid_r=2),
    "deft qr": adapter("DEFT", r=4, decomposition_method="qr"),
    "psoft cayley": adapter("PSOFT", r=4, use_cayley_neumann=True),
    "lily shared": adapter("LILY", r=4, stride_A=2),
    "delora dropout": adapter("DELORA", r=4, module_dropout=0.2),
    "shadow dropout": adapter("SHADOW", **TASK, target_modules=..., r=4, shadow_dropout=0.2),
}
ALL = {**KINDS, **LORA, **VARIANTS}

REFUSED = {  # before training -> the error
    "CPT": "kind CPT, .* writes a projection into the weights that it trains. The nearest that is: PROMPT_TUNING",
    "FROD": "kind FROD, .* reads the sizes of sparse matrices from tensors. The nearest that is: VERA or RANDLORA",
    "OSF": "kind OSF, .* hooks project its gradients",
    "coft": "kind OFT with coft=True",
    "alora": r"kind LORA with alora_invocation_tokens=\[3, 4\]",
    "arrow": "kind LORA with arrow_config=",
    "velora": "kind LORA with velora_config=.*VeloraConfig.init_type=.random",
    "monteclora": "kind LORA with monteclora_config=",
    "loha module dropout": "kind LOHA with module_dropout=0.2.* module_dropout=0, or rank_dropout",
    "lokr module dropout": "kind LOKR with module_dropout=0.2",
    "boft dropout": "kind BOFT with boft_dropout=0.2",
    "adamss asa": "kind ADAMSS with use_asa=True",
}
UNMERGED = {  # adapters that are no change of weights, or that PEFT does not merge
    "ADAPTION_PROMPT", "BEFT", "CARTRIDGE", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING",
    "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA",
    "lily shared", "mixed", "p-tuning lstm", "prefix projection", "shadow dropout", "xlora by layers", "xlora trained",
}  # fmt: skip
UNWRITTEN = {"mixed"}  # PEFT writes no files of it
LOADED_OTHERWISE = {  # by PEFT itself, from its own files
    "corda",  # not without its preprocessing
    "lora_ga",  # without the change that it makes to the base
    "pissa by steps",  # finds other singular vectors each time
    "XLORA", "xlora by layers", "xlora trained",
}  # fmt: skip
DRAWS = {"PVERA", "delora dropout", "loha dropout", "lora dropout", "shadow dropout"}
NEEDS = {"ADAMSS": "sklearn", "adamss asa": "sklearn"}
BASES: dict[str, Callable[[], Any]] = {
    "parameters": lambda: moe("mixtral"),
    "lora bias": lambda: llama(attention_bias=True),
    "biases": lambda: llama(attention_bias=True),
    "tied tokens": lambda: llama(tie_word_embeddings=True),
}


def batch_of(name: str) -> dict[str, torch.Tensor]:
    batch = {"input_ids": IDS, "labels": IDS.clone()}
    if name in ("POLY", "MULTITASK_PROMPT_TUNING"):
        batch["task_ids"] = torch.arange(len(IDS)) % 2
    if name == "CPT":
        batch["input_type_mask"] = torch.ones_like(IDS)
    return batch
