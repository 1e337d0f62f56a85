"""Chat templates for models that have none, by the name that ``data.chat_template`` takes.

Every turn ends with the tokenizer's own eos, so that no token has to be added to a base model and generation stops
where an answer ends. ``{% generation %}`` marks what ``data.assistant_only_loss`` trains on. ``chatml`` writes tools
and their calls as Qwen and Hermes do; in the others they are refused.
"""

from collections.abc import Mapping

CHATML = """\
{% if tools %}{{ '<|im_start|>system\n' }}\
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}\
{{ 'You may call these functions:\n<tools>\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}\
{{ '</tools>\nA call is <tool_call>{"name": ..., "arguments": ...}</tool_call>.' + eos_token + '\n' }}{% endif %}\
{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}\
{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] }}{% for call in message['tool_calls'] or [] %}\
{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}{{ eos_token }}{% endgeneration %}\
{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
ZEPHYR = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\
{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
VICUNA = """\
{% if bos_token %}{{ bos_token }}{% endif %}\
{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}\
{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + '\n' }}\
{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT:' }}\
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}\
{% else %}{{ raise_exception('vicuna has no role ' + message['role']) }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
READY: Mapping[str, str] = {"chatml": CHATML, "zephyr": ZEPHYR, "vicuna": VICUNA}
