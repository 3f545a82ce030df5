"""Small folders with random weights in the classes, tokenizers and chat templates of released models."""
import json

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from conftest import ROOT

# Each template as the family has it, without tools.
CHATML = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
          "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
          "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN2 = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "assistant") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LLAMA2 = ("{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
          "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
          "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
          "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must "
          "alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != "
          "false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
          "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
          "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
          "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
MISTRAL = ("{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
           "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}"
           "{{ bos_token }}{% for message in loop_messages %}{% if message['role'] == 'user' %}"
           "{% if loop.first and system_message is defined %}{{ '[INST] ' + system_message + '\\n\\n' + "
           "message['content'] + '[/INST]' }}{% else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
           "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}")
ZEPHYR = ("{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
          "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
          "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
          "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
          "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}")
SIZES = dict(vocab_size=640, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512)
SPLIT_QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
              r"\s+(?!\S)|\s+")
# config, chat template, beginning and end of a text, more special tokens
FAMILIES = {
    "qwen3": (transformers.Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True, rope_theta=1e6), QWEN3,
              None, "<|im_end|>", ["<|endoftext|>", "<|im_start|>"]),
    "qwen2.5": (transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, rope_theta=1e6), QWEN2,
                None, "<|im_end|>", ["<|endoftext|>", "<|im_start|>"]),
    "llama3": (transformers.LlamaConfig(
        **{**SIZES, "max_position_embeddings": 16384}, rope_theta=5e5, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_scaling={"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 8192}), LLAMA3,
               "<|begin_of_text|>", "<|end_of_text|>",  # Llama 3.0's, which is not the end of an answer
               ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]),
    "smollm2": (transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=1e5),
                CHATML, "<|im_start|>", "<|im_end|>", ["<|endoftext|>"]),
    "llama2": (transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5), LLAMA2, "<s>", "</s>", ["<unk>"]),
    "mistral": (transformers.MistralConfig(**SIZES, head_dim=24, sliding_window=None, rope_theta=1e6),  # v0.3
                MISTRAL, "<s>", "</s>", ["<unk>", "[INST]", "[/INST]"]),
    "tinyllama": (transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5), ZEPHYR, "<s>", "</s>", ["<unk>"]),
}


def train_bpe(size, special, sentencepiece=False):
    """A tokenizer of `size` tokens and the special ones, with Qwen's split, or like SentencePiece with bytes."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    if sentencepiece:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                                     normalizers.Replace(" ", "\u2581")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                               decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        special = special + [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, limit_alphabet=90,
                                      max_token_length=8)
        tokenizer.train_from_iterator([" ".join(text.split()[:900]) for text in texts], trainer)
        content = json.loads(tokenizer.to_str())  # bytes are no special tokens
        added = content["added_tokens"]
        content["added_tokens"] = [token for token in added if not token["content"].startswith("<0x")]
        return Tokenizer.from_str(json.dumps(content))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT_QWEN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet,
                                                             show_progress=False))
    tokenizer.add_special_tokens(special)
    return tokenizer


def write_family(family, folder, dtype=torch.float32):
    """A folder as on the hub, in several files. Returns transformers' model."""
    config, template, bos, eos, more = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    special = [token for token in (*more, bos, eos) if token]
    tokenizer = train_bpe(600 if bos != "<s>" else 620, list(dict.fromkeys(special)), bos == "<s>")
    model.generation_config.eos_token_id = eos and tokenizer.token_to_id(eos)  # not the class's default
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save(f"{folder}/tokenizer.json")
    names = {"bos_token": bos, "eos_token": eos and {"__type": "AddedToken", "content": eos}}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    if family in ("qwen3", "qwen2.5", "llama3"):
        (folder / "chat_template.jinja").write_text(template)
    else:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model
