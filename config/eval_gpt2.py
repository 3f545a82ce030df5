# What evaluate.py is to print for OpenAI's GPT-2 124M, as lm-evaluation-harness does, zero-shot: HellaSwag acc 0.2892 and
# acc_norm 0.3114, over 10,042 examples with a standard error of 0.005. It has not been run here, for want of weights.
#   python evaluate.py config/eval_gpt2.py
checkpoint = "gpt2"
tasks = "hellaswag"
