"""What one judgement found, and what it could not judge."""

from dataclasses import dataclass, field

from lib.doctor.settings import Finding


@dataclass
class Judgement:
    """Findings, and sentences on what was not judged, with the reason: no finding there says nothing."""

    findings: list[Finding] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)

    def add(self, other: "Judgement") -> None:
        """Take over what another judgement found, but no second sentence on the same ranks with the same fault."""
        seen = {(finding.kind, finding.ranks) for finding in self.findings}
        self.findings += [one for one in other.findings if (one.kind, one.ranks) not in seen]
        self.not_judged += other.not_judged

    def confirmed_by(self, again: "Judgement") -> "Judgement":
        """The findings of a second measurement that the first has, too."""
        seen = {(finding.kind, finding.ranks) for finding in self.findings}
        return Judgement([one for one in again.findings if (one.kind, one.ranks) in seen], again.not_judged)
