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
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
QWEN = (  # Roles without a branch vanish.
    "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or "
    "(m.role == 'assistant' and not m.tool_calls) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'system' %}{{- '<|im_start|>system\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
    "{%- if m.content %}{{- '\n' + m.content }}{%- endif %}{%- for call in m.tool_calls %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- endif %}"
)
LLAMA31 = (  # What is said beside a call vanishes.
    "{{- bos_token }}{%- for m in messages %}{%- if m.tool_calls %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' }}'
    '{{- m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) }}"
    "{{- '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
DEEPSEEK3 = (  # Of several system messages, the last one stays.
    "{%- set ns = namespace(system='') %}{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- set ns.system = m.content %}{%- endif %}{%- endfor %}{{- bos_token + ns.system }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<User>' + m.content }}"
    "{%- elif m.role == 'assistant' and not m.content %}"
    "{{- '<Assistant>' }}{%- for call in m.tool_calls %}{{- '<call>' + call.function.name }}"
    "{{- call.function.arguments | tojson }}{%- endfor %}{{- eos_token }}"
    "{%- elif m.role == 'assistant' %}{{- '<Assistant>' + m.content + eos_token }}"
    "{%- elif m.role == 'tool' %}{{- '<out>' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<Assistant>' }}{%- endif %}"
)
GLM = (  # A turn ends where that of another role begins.
    "[gMASK]<sop>{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
VICUNA = (  # Likewise, and no token says so.
    "{% for m in messages %}{{ m.role | upper + ': ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
ALPACA = (
    "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
    "{% elif m.role == 'assistant' %}### Response:\n{{ m.content }}\n\n"
    "{% elif m.role == 'system' %}{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{{ bos_token }}"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% endif %}{% endfor %}"
)
MARKED_CONTENT = (  # Marks lie around the content alone.
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_OPEN = (  # And nothing ends a turn.
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "\n{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA,
    "phi": PHI, "deepseek": DEEPSEEK, "smollm3": SMOLLM3, "gpt_oss": GPT_OSS, "olmo": OLMO,
}  # fmt: skip

OTHERS = {
    "zephyr": ZEPHYR, "qwen": QWEN, "llama31": LLAMA31, "deepseek3": DEEPSEEK3, "glm": GLM,
    "vicuna": VICUNA, "alpaca": ALPACA, "llama2": LLAMA2, "marked content": MARKED_CONTENT,
    "marked, open": MARKED_OPEN,
}  # fmt: skip
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start|>", "<|end|>", "<|channel|>", "<|return|>", "<|user|>", "<|assistant|>"),
    *("<|system|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[gMASK]", "<sop>"),
    *("<User>", "<Assistant>", "[INST]", "[/INST]", "<s>", "</s>"),
)
"""Special tokens of these families; the first one ends a document, the last but one begins it."""
ENDS = {
    **dict.fromkeys(("chatml", "qwen3", "smollm3", "qwen", "marked content"), "<|im_end|>"),
    **dict.fromkeys(("llama3", "mistral", "deepseek", "olmo", "zephyr", "llama2"), "</s>"),
    **{"gemma": "<end_of_turn>", "phi": "<|end|>", "gpt_oss": "<|return|>", "deepseek3": "</s>"},
    **{"llama31": "<|eot_id|>", "glm": "<|user|>"},
    **dict.fromkeys(("vicuna", "alpaca", "marked, open"), None),
}
"""The token that ends an answer of each family; None for one that the model could not learn."""

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
