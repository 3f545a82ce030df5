"""
Attaches the optional features that a run's settings ask for. Both training loops call these functions; each feature of
extras/ is one file, imported only if it is used, and can be deleted with its lines here. A feature is off in a
loop that does not declare its settings.
"""
from configurator import one_line_errors
from distributed import print0

explain_missing = one_line_errors(advice="a setting needs this module, but it is missing", errors=ModuleNotFoundError)


@explain_missing
def change_model(model, loader, max_iters, config, dtype, options, checkpoint, resuming, state, metrics):
    """
    Attaches the features that change the model, its initial weights or its loss. Call it before the model is compiled
    and distributed. options: for torch.compile, or None. Adds to `state` and `metrics`; LoRA and FSDP replace the
    entry "model".
    """
    if config.get("local_heads"):
        from extras.local_heads import init_local_heads
        init_local_heads(model, checkpoint)
    if config.get("lora_rank"):
        from extras.lora import Adapters, Lora
        state["lora"] = Lora(model, config, dtype, checkpoint, resuming)
        state["model"] = Adapters(model)
    if options and loader.device.type == "cpu":
        try:
            from extras.block_attention import attend_in_blocks
            for block in model.transformer.h:
                block.attn.attend = attend_in_blocks
        except ModuleNotFoundError:
            print0("extras/block_attention.py is not here: attention is slower on a CPU")
    if config.get("teacher"):
        from extras.distill import Distillation
        state["teacher"] = distillation = Distillation(
            model, loader, max_iters, config, dtype, options, checkpoint if resuming else None)
        metrics.append(distillation.metrics)
    if config.get("fsdp"):
        from extras.fsdp import ShardedModel, apply_fsdp
        apply_fsdp(model, loader.device, dtype, options)
        state["model"] = ShardedModel(state["model"])


@explain_missing
def change_training(model, optimizer, max_iters, config, checkpoint, state, metrics):
    """
    Attaches the features that change training. Call it once the optimizer exists. Changes `state` and `metrics` in
    place. Returns gradient_hooks; guard, which rolls back after a spike, or None; and trackers, functions that receive
    each line of the log.
    """
    gradient_hooks, guard, trackers = [], None, []
    if state["scaler"].is_enabled():  # float16
        metrics.append(lambda: {"loss_scale": state["scaler"].get_scale()})
    if config.get("fsdp"):
        from extras.fsdp import ShardedOptimizer
        state["optimizer"] = ShardedOptimizer(optimizer)
    if config.get("sparsity"):
        from extras.prune import Pruner
        state["masks"] = pruner = Pruner(model, optimizer, config, max_iters, checkpoint)
        gradient_hooks.append(pruner.mask_gradients)
        metrics.append(pruner.metrics)
    if config["optimizer"] == "adamw_spam":
        from extras.spam import spam_hook
        gradient_hooks.append(spam_hook(optimizer, config))
    if config.get("spike_loss") or config.get("spike_norm"):
        from extras.rollback import SpikeGuard
        state["health"] = guard = SpikeGuard(config, optimizer)
        gradient_hooks.append(guard.scale_lr)
        metrics.append(guard.metrics)
    if config.get("wandb_log") or config.get("tensorboard"):
        from extras.trackers import Trackers
        state["trackers"] = tracker = Trackers(config)
        trackers.append(tracker)
    return gradient_hooks, guard, trackers


@explain_missing
def check_sanity(*arguments):
    """--sanity_check=True: looks for what keeps a model from learning, and exits."""
    from extras.sanity import check
    check(*arguments)


def evaluation_hooks(model, tokenizer, autocast, prompt, config, stage):
    """
    Returns what to run after each evaluation, besides the loss: functions hook(iter_num, done) that return a dict for
    the log. prompt: the ids that the sample continues. stage: base | chat.
    """
    hooks = []
    if config.get("sample_tokens"):
        from sample import sample_hook
        hooks.append(sample_hook(model, tokenizer, autocast, prompt, stage, config))
    if config.get("eval_tasks"):
        from evaluate import task_hook
        hooks.append(task_hook(model, tokenizer, autocast, stage, config))
    try:
        from extras.plot import plot_hook
        hooks.append(plot_hook(config["out_dir"]))
    except ImportError as error:
        print0(f"loss.png is not drawn: {error}")
    return hooks
