"""`anydevice completion`: a script that completes commands, options and names in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from shlex import quote

from anydevice._core.backends import BACKENDS
from anydevice._core.dtypes import DTYPES
from anydevice._machine.engines.registry import engine_names
from anydevice.cli.main import COMMANDS, command_parser
from anydevice.cli.printing import Output

EXAMPLE = "anydevice completion bash > ~/.local/share/bash-completion/completions/anydevice"

_INSTALL = {
    "bash": "Put it into ~/.local/share/bash-completion/completions/anydevice, or source it.",
    "zsh": "Put it into a folder of $fpath as _anydevice, or source it after compinit.",
    "fish": "Put it into ~/.config/fish/completions/anydevice.fish.",
}
_BASH = """\
_anydevice() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command= words= i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case " {commands} " in *" ${{COMP_WORDS[i]}} "*) command=${{COMP_WORDS[i]}}; break ;; esac
    done
    if [[ $word == "=" ]]; then word=; elif [[ $before == "=" ]]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case "$command $before $word" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _anydevice anydevice
"""
# zsh runs functions of bash. It reads the file at the first request, which the last line answers.
_ZSH = """\
#compdef anydevice
autoload -U +X bashcompinit && bashcompinit
{bash}\
[[ "${{funcstack[1]}}" != _anydevice ]] || _bash_complete -o default -F _anydevice
"""

_BARE = (0, "?")
"""`nargs` of options after which any word may follow."""
Parsers = Mapping[str, argparse.ArgumentParser]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(_INSTALL), help="the shell that will read it")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the script for a shell, made from the parsers of all commands."""
    parsers = {name: command_parser(name) for name in ("", *COMMANDS)}
    bash = _BASH.format(commands=" ".join(COMMANDS), cases="\n".join(_bash_cases(parsers)))
    fish = "".join(f"{line}\n" for line in _fish_lines(parsers))
    scripts = {"bash": bash, "zsh": _ZSH.format(bash=bash), "fish": fish}
    output.stream.write(f"{scripts[arguments.shell]}# {_INSTALL[arguments.shell]}\n")
    return 0


def _arguments_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a parser takes, except commands and what its help hides."""
    actions = parser._actions  # argparse has no public list
    return [x for x in actions if x.help != argparse.SUPPRESS and x.nargs != argparse.PARSER]


def _values_of(action: argparse.Action) -> list[str]:
    known = {"DEVICE": [*BACKENDS, "gpu"], "ENGINE": engine_names(), "DTYPE": DTYPES}
    return [str(value) for value in action.choices or known.get(str(action.metavar), ())]


def _bash_cases(parsers: Parsers) -> Iterator[str]:
    """Yield what fits each option's value, and then the words of each command."""
    for command, parser in parsers.items():
        actions = _arguments_of(parser)
        for action in actions:
            for name in action.option_strings if action.nargs not in _BARE else ():
                yield f'        "{command} {name} "*) words="{" ".join(_values_of(action))}" ;;'
        places = [_values_of(action) for action in actions if not action.option_strings]
        words = [value for values in places for value in values] + [*(() if command else COMMANDS)]
        words += [name for action in actions for name in action.option_strings]
        # Where a file may stand, options are for a word that begins with a dash.
        pattern = f'"{command} "*" -"*' if [] in places else f'"{command} "*'
        yield f'        {pattern}) words="{" ".join(words)}" ;;'


def _fish_lines(parsers: Parsers) -> Iterator[str]:
    for name, summary in COMMANDS.items():
        yield f"complete -c anydevice -n __fish_use_subcommand -f -a {name} -d {quote(summary)}"
    for command, parser in parsers.items():
        place = f"'__fish_seen_subcommand_from {command}'" if command else "__fish_use_subcommand"
        for action in _arguments_of(parser):
            names = [f"-{'sl'[x[:2] == '--']} {x.lstrip('-')}" for x in action.option_strings]
            values = " ".join(_values_of(action))
            takes = f"-x -a '{values}'" if values else "" if action.nargs in _BARE else "-r"
            if names or values:
                words = (*names, takes, "-d", quote(action.help or ""))
                yield f"complete -c anydevice -n {place} {' '.join(filter(None, words))}"
