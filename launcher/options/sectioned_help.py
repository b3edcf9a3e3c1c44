"""Help of a verb with many options, in sections, so that a stranger finds the few that matter to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click


class SectionedCommand(click.Command):
    """A command whose options stand under headings; those that no section names stand under the last one.

    Both are set after the command was made. `sections`: heading -> names of parameters, in the order to be shown.
    `tables`: heading -> rows of two columns, shown after the options.
    """

    sections: Mapping[str, Sequence[str]] = {}
    tables: Mapping[str, Sequence[tuple[str, str]]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options section by section, one column for all."""
        records = {
            parameter.name: record
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None
        }
        width = max(len(record[0]) for record in records.values())
        *_, last = self.sections
        named = {name for names in self.sections.values() for name in names}
        for heading, names in self.sections.items():
            rest = [name for name in records if name not in named] if heading == last else []
            with formatter.section(heading):
                shown = [records[name] for name in (*names, *rest) if name in records]
                formatter.write_dl([(f"{option:<{width}}", text) for option, text in shown], col_max=width)
        for heading, rows in self.tables.items():
            with formatter.section(heading):
                formatter.write_dl(list(rows))
