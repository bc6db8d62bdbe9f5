"""The commands of `psctl token`."""

from pathlib import Path
from typing import Annotated

import typer

from psctl.options import JsonOption, parsed, show
from pswire.options import choice_option
from pswire.security.roles import Role

app = typer.Typer(
    no_args_is_help=True,
    help="Makes, lists and revokes the tokens of a job.",
)

TokensOption = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="The file of the daemons' --tokens. It has no token, only digests.",
    ),
]


@app.command()
def create(
    *,
    tokens: TokensOption,
    role: Annotated[
        str,
        choice_option(
            [each.value for each in Role],
            help="What its holder may do: change the job, be a shard, train, or read.",
        ),
    ],
    worker_id: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="With --role worker, the one worker that it speaks for; any by "
            "default.",
        ),
    ] = "",
    expires: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long it counts, such as 12h or 30d; for ever by default.",
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the token goes, for its user alone, in place of one that is "
            "there: the file of its holder's --token-file.",
        ),
    ] = None,
    prints: Annotated[
        bool, typer.Option("--print", help="Print the token, in place of --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Makes a token.

    Example: psctl token create --tokens tokens.json --role worker --out worker.token

    Daemons that run know it within a second. To replace a token, make another one with
    the same --out, and revoke the former one when its holders have the file.
    """
    from psctl.tokens import create as created
    from psctl.tokens import made_json, made_text, parsed_lifetime

    if (out is None) is not prints:
        raise typer.BadParameter(
            "say where the token goes, or give --print", param_hint="--out"
        )
    lifetime = parsed("--expires", lambda: parsed_lifetime(expires))
    made = created(tokens, Role(role), worker_id, lifetime, out)
    show(as_json, made_json(made), made_text(made))


@app.command("list")
def list_command(*, tokens: TokensOption, as_json: JsonOption = False) -> None:
    """Lists the tokens that daemons know: role, worker, end.

    Example: psctl token list --tokens tokens.json
    """
    from psctl.tokens import listed, tokens_json, tokens_text

    entries = listed(tokens)
    show(as_json, tokens_json(entries), tokens_text(entries))


@app.command()
def revoke(
    token_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="As `psctl token list` shows it."),
    ],
    *,
    tokens: TokensOption,
    as_json: JsonOption = False,
) -> None:
    """Makes tokens count no more.

    Example: psctl token revoke 3f2a91c0 --tokens tokens.json

    Daemons that run end what their holders have open within a second. A worker whose
    token is revoked is out of the job within a lease.
    """
    from psctl.tokens import revoke as revoked
    from psctl.tokens import tokens_json

    entries = revoked(tokens, token_ids)
    names = ", ".join(each.token_id for each in entries)
    show(as_json, tokens_json(entries), f"revoked: {names}")
