#!/usr/bin/env python
"""LoRA fine-tuning of a latent text-to-image model."""
import argparse
import logging
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from t2i.launcher import Launcher
from t2i.latents import LatentCache, prepare_images
from t2i.models import Denoiser, TextEncoder, TinyVAE, inject_lora, lora_parameters, lora_state_dict

logger = logging.getLogger("t2i")


def parse_args():
    p = argparse.ArgumentParser()
    here = Path(__file__).resolve().parent
    p.add_argument("--output_dir", default=str(here / "out"))
    p.add_argument("--data_dir", default=str(here / "out" / "data"))
    p.add_argument("--num_images", type=int, default=192)
    p.add_argument("--rank_lora", type=int, default=4)
    p.add_argument("--train_batch_size", type=int, default=8)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--max_train_steps", type=int, default=40)
    p.add_argument("--learning_rate", type=float, default=1e-3)
    p.add_argument("--caption_dropout", type=float, default=0.1)
    p.add_argument("--snr_gamma", type=float, default=5.0)
    p.add_argument("--checkpointing_steps", type=int, default=20)
    p.add_argument("--validation_steps", type=int, default=20)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


@torch.no_grad()
def log_validation(launcher, unet, text_encoder, vae, cache, step, n=4, num_inference_steps=8, guidance=3.0):
    net = launcher.unwrap(unet)
    net.eval()
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(1, 64, (n, 8), generator=g)
    cond, uncond = text_encoder(ids), text_encoder(torch.zeros_like(ids))
    x = torch.randn(n, *cache.shape, generator=g)
    for i in range(num_inference_steps):
        s = torch.full((n,), 1 - i / num_inference_steps)
        e_c, e_u = net(x, s, cond), net(x, s, uncond)
        x = x - (e_u + guidance * (e_c - e_u)) / num_inference_steps
    imgs = vae.decode(cache.denormalise(x))
    torch.save(imgs, Path(launcher.output_dir) / f"validation_{step}.pt")
    net.train()


def main():
    args = parse_args()
    launcher = Launcher(args.output_dir, args.gradient_accumulation_steps)
    logging.basicConfig(level=logging.INFO if launcher.is_main_process else logging.WARNING,
                        format="%(asctime)s %(name)s %(message)s")
    torch.manual_seed(args.seed)
    random.seed(args.seed + launcher.process_index)

    vae, text_encoder, unet = TinyVAE(), TextEncoder(), Denoiser()
    for m in (vae, text_encoder, unet):
        m.requires_grad_(False)
    inject_lora(unet, args.rank_lora)
    optimizer = torch.optim.AdamW(lora_parameters(unet), lr=args.learning_rate)

    with launcher.main_process_first():
        images, captions = prepare_images(args.data_dir, args.num_images)
        cache = LatentCache(launcher, vae).build(images, captions)
    logger.info("latents %d per process, mean %.4f std %.4f", len(cache), cache.mean.mean(), cache.std.mean())

    torch.manual_seed(args.seed + launcher.process_index)
    loader = DataLoader(TensorDataset(cache.latents, cache.captions),
                        batch_size=args.train_batch_size, shuffle=True, drop_last=True)
    unet = launcher.prepare(unet)

    step, micro, running = 0, 0, 0.0
    while step < args.max_train_steps:
        for latents, ids in loader:
            latents = cache.normalise(latents)
            drop = torch.rand(len(ids)) < args.caption_dropout
            ids = ids.masked_fill(drop[:, None], 0)
            with launcher.accumulate(unet, micro):
                noise = torch.randn_like(latents)
                sigma = torch.rand(len(latents))
                s = sigma[:, None, None, None]
                pred = unet((1 - s) * latents + s * noise, sigma, text_encoder(ids))
                snr = ((1 - sigma) / sigma.clamp(min=1e-3)).square()
                weight = torch.minimum(snr, torch.full_like(snr, args.snr_gamma)) / snr.clamp(min=1e-2)
                per = F.mse_loss(pred, noise - latents, reduction="none").mean((1, 2, 3))
                loss = (weight * per).mean()
                (loss / args.gradient_accumulation_steps).backward()
            micro += 1
            running += loss.item() / args.gradient_accumulation_steps
            if micro % args.gradient_accumulation_steps:
                continue
            torch.nn.utils.clip_grad_norm_(lora_parameters(unet), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 10 == 0:
                avg = launcher.reduce_mean(torch.tensor(running / 10))
                logger.info("step %d loss %.4f", step, avg.item())
                running = 0.0
            if launcher.is_main_process:
                if step % args.checkpointing_steps == 0:
                    torch.save(lora_state_dict(launcher.unwrap(unet)), Path(args.output_dir) / f"lora-{step}.pt")
                if step % args.validation_steps == 0:
                    log_validation(launcher, unet, text_encoder, vae, cache, step)
            if step >= args.max_train_steps:
                break
    launcher.wait_for_everyone()
    launcher.end_training()


if __name__ == "__main__":
    main()
