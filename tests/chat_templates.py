"""Chat templates in the manner of ten families of models, and conversations for them."""

CHATML = (
    "{%- if tools %}<|im_start|>system\n# Tools\n"
    "{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{{- m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    "{{- call.function.name }} {{ call.function.arguments | tojson }}\n</tool_call>{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Thoughts of earlier turns are forgotten, and the last answer has an empty place for them.
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set thought = m.reasoning_content or '' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{- m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}{{- '<call>' + call.function.name + '</call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + eos_token }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<Assistant>' + m.content.split('</think>')[-1] }}"
    "{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"
)
SMOLLM3 = (
    "{%- if date is not defined %}{%- set date = '1 May' %}{%- endif %}{{- '# ' + date + '\n' }}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}{%- else %}"
    "{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
GPT_OSS = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- if m.thinking %}"
    "{%- generation %}{{- '<|channel|>analysis ' + m.thinking + '<|end|>' }}{%- endgeneration %}"
    "{%- endif %}{%- generation %}{{- '<|channel|>final ' + m.content + '<|return|>' }}"
    "{%- endgeneration %}{%- else %}{{- '<|start|>' + m.role + ' ' + m.content + '<|end|>' }}"
    "{%- endif %}{%- endfor %}"
)
OLMO = (
    "{{ eos_token }}{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% else %}"
    "{{ m.content }}\n{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA,
    "phi": PHI, "deepseek": DEEPSEEK, "smollm3": SMOLLM3, "gpt_oss": GPT_OSS, "olmo": OLMO,
}  # fmt: skip

BORDERS = {
    "chatml": ("<|im_start|>user\n", "<|im_start|>assistant\n"),
    "qwen3": ("<|im_start|>user\n", "<|im_start|>assistant\n"),
    "llama3": ("<|start|>user<|end|>\n\n", "<|start|>assistant<|end|>\n\n"),
    "mistral": ("[INST]", "[/INST]"),
    "gemma": ("<start_of_turn>user\n", "<start_of_turn>model\n"),
    "phi": ("<|user|>\n", "<|assistant|>\n"),
    "deepseek": ("<User>", "<Assistant>"),
}
"""What begins a turn of the user, and an answer, in templates without marks."""


def said(*texts: str, **last: object) -> list[dict[str, object]]:
    """A user and an assistant in turns; the last message has the other keys too."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]
    return [*messages[:-1], messages[-1] | last]


CONVERSATIONS = {
    "one turn": said("Hi", "Hello."),
    "system": [{"role": "system", "content": "Be brief."}, *said("2+2?", "Four ß, ünd")],
    "turns": said("a", "b", "c", "d e", "f", "  g\n"),
    "user last": said("a", "b", "c"),
}
