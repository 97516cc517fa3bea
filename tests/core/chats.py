"""Chat templates in the shape of well-known models' own, and fakes around them."""

import re
from types import SimpleNamespace

from daric_rag.config import DaricConfig
from daric_rag.engine import ChatMessage
from daric_rag.input_processor import InputProcessor

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "<|start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|start|>{{ m['content'] }}"
    "<|eot|>{% endif %}{% endfor %}"
)
# Opens the answer otherwise than it writes an earlier one.
THINKS_FIRST = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|eot|>"
    "{% endfor %}<|start|>assistant\n<think>{{ '\n' }}"
)
# Takes the reasoning out of every turn but those behind the last question.
FORGETS_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last "
    "and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|eot|>{% endfor %}"
    "<|start|>assistant{{ '\n' }}"
)
# Writes empty tags before an earlier answer, whose reasoning it takes out, and parses
# the reasoning behind the last question.
REWRITES_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% set thought = m['reasoning_content'] or '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and thought %}<think>{{ thought.strip() }}</think>"
    "{% else %}<think></think>{% endif %}{{ '\n' + content.strip() }}"
    "{% for call in m['tool_calls'] %}<call>{{ call['function'] | tojson }}"
    "{% endfor %}{% else %}{{ m['content'] }}{% endif %}<|eot|>{% endfor %}"
    "<|start|>assistant{{ '\n' }}"
)
# The system text goes into the last user message.
LATE_SYSTEM = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}"
    "{% elif m['role'] == 'user' %}[INST] {{ ns.system if loop.last else '' }}"
    "{{ m['content'] }} [/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# One tool a line; calls and results in tags.
TOOL_LINES = (
    "{% set line = '\n' %}"
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + line * 2 }}"
    "{% endif %}# Tools\n<tools>"
    "{% for tool in tools %}{{ line }}{{ tool | tojson }}{% endfor %}{{ line }}"
    "</tools>\nCall them.<|im_end|>{{ line }}"
    "{% elif messages[0]['role'] == 'system' %}"
    "<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>{{ line }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "<|im_start|>user{% endif %}{{ line }}<result>\n{{ m['content'] }}\n</result>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}"
    "<|im_end|>{{ line }}{% endif %}"
    "{% elif m['role'] != 'system' or not loop.first %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for call in m['tool_calls'] %}"
    "{% if m['content'] or not loop.first %}{{ line }}{% endif %}"
    "<call>{{ call['function'] | tojson }}</call>{% endfor %}<|im_end|>{{ line }}"
    "{% endif %}{% endfor %}<|im_start|>assistant{{ line }}"
)
# A list of tools before the last user message; no text beside calls.
TOOL_LIST = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') "
    "| list %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% if tools and m == users[-1] %}[TOOLS] [{% for tool in tools %}"
    "{{ tool | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}][/TOOLS]"
    "{% endif %}[INST] {{ m['content'] }} [/INST]{% elif m['role'] == 'tool' %}"
    "[RESULT] {{ m['content'] }}[/RESULT]{% elif m['tool_calls'] %}"
    "[CALLS] {% for call in m['tool_calls'] %}{{ call['function'] | tojson }}"
    "{% endfor %}{{ eos_token }}{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# Tools as declarations, their description in front of the name.
TOOL_DECLARATIONS = (
    "{% for tool in tools or [] %}// {{ tool['function']['description'] }}\n"
    "def {{ tool['function']['name'] }}()\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|eot|>"
    "{% endfor %}<|start|>assistant{{ '\n' }}"
)
# Results as JSON, hence escaped; a trimmed system text and question.
TOOL_JSON = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|end|>"
    "{% if m['role'] == 'tool' %}{{ {'output': m['content']} | tojson }}"
    "{% elif m['tool_calls'] %}{{ m['tool_calls'][0]['function'] | tojson }}"
    "{% else %}{{ m['content'] | trim }}{% endif %}<|eot|>{% endfor %}"
    "<|start|>assistant<|end|>"
)
# Writes the tool results behind the last answer only.
LAST_RESULTS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}"
    "{% if m['role'] != 'tool' or loop.index0 > ns.last %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}{% for call in m['tool_calls'] %}"
    "{{ call['function'] | tojson }}{% endfor %}<|eot|>{% endif %}{% endfor %}"
    "<|start|>assistant{{ '\n' }}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "drops_system": DROPS_SYSTEM,
}
SPECIAL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start|>")
SPECIAL += ("<|end|>", "<|eot|>")
ROLES = ("<|User|>", "<|Bot|>")  # role markers that are not marked as special


class FakeTokenizer:
    """Words and single signs; like many, it makes one token of a trailing blank line,
    and two of one before a word."""

    bos_token_id, eos_token_id, unk_token_id = 0, 1, 2

    def __init__(self, render=None, adds_bos=False):
        self.vocab = {text: i for i, text in enumerate(SPECIAL + ROLES)}
        self.added_tokens_decoder = {
            i: SimpleNamespace(content=text, special=text in SPECIAL)
            for text, i in self.vocab.items()
        }
        signs = "|".join(map(re.escape, self.vocab))
        self.pattern = re.compile(rf"{signs}|\w+|\s+(?!\S)|\s|.")
        self.chat_template, self.adds_bos = render, adds_bos
        self.texts, self.num_renders = [], 0

    def encode(self, text, *, add_special_tokens):
        self.texts.append(text)
        ids = [
            self.vocab.setdefault(token, len(self.vocab))
            for token in self.pattern.findall(text)
        ]
        return [0] * (self.adds_bos and add_special_tokens) + ids

    def apply_chat_template(
        self, conversation, *, tokenize, add_generation_prompt, tools=None
    ):
        assert (tokenize, add_generation_prompt) == (False, True)
        self.num_renders += 1
        if tools is None:
            return self.chat_template(conversation)
        return self.chat_template(conversation, tools)

    def decode(self, ids):
        texts = {i: text for text, i in self.vocab.items()}
        return "".join(texts[i] for i in ids)


def chatml(messages):
    turns = "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages
    )
    return turns + "<|im_start|>assistant\n"


def bot(messages):
    return "".join(f"<|User|>{m['content']}" for m in messages) + "<|Bot|>"


def processor(tokenizer, max_model_len=1000, **fields):
    return InputProcessor(
        tokenizer,
        config=DaricConfig(**fields),
        block_size=8,
        max_model_len=max_model_len,
    )


def texts_of(tokenizer, layout):
    return [tokenizer.decode(layout.token_ids[a:b]) for a, b in layout.spans]


def told(*texts, system=None):
    """A conversation of user and assistant in turn."""
    roles = ("user", "assistant")
    turns = [ChatMessage(roles[i % 2], text) for i, text in enumerate(texts)]
    return [ChatMessage("system", system), *turns] if system is not None else turns


def tool(name, **fields):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": function | fields}


def call(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": "callnine1", "type": "function", "function": function}


def at_once(tokenizer, messages, tools=()):
    """The template's own rendering of a conversation of plain texts."""
    plain = []
    for message in messages:
        fields = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = list(message.tool_calls)
        plain.append(fields)
    variables = {"tools": list(tools)} if tools else {}
    return tokenizer.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=True, **variables
    )
