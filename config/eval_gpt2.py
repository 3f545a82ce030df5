# OpenAI's GPT-2 124M on HellaSwag, zero-shot. lm-evaluation-harness prints acc 0.2892 and acc_norm 0.3114 over its
# 10,042 examples, with a standard error of 0.005. Not run here: the weights were not available.
#   python evaluate.py config/eval_gpt2.py
checkpoint = "gpt2"
tasks = "hellaswag"
