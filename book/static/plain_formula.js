// A formula as plain symbols, for text that nobody typesets: \frac{n-1}{n}\,S is "(n−1)/n S". It knows what pages write
// within a line; a test gives it all of that, and sees a backslash where something is new.
const plainFormula = (() => {
  const SYMBOLS = { cdot: "·", times: "×", le: "≤", ge: "≥", approx: "≈", leftarrow: "←", infty: "∞", dots: "…", partial: "∂", sum: "∑", odot: "⊙", top: "⊤", Psi: "Ψ", alpha: "α", beta: "β", delta: "δ", epsilon: "ϵ", ell: "ℓ", eta: "η", theta: "θ", mu: "μ", tau: "τ", ln: "ln", lceil: "⌈", rceil: "⌉", lfloor: "⌊", rfloor: "⌋", lVert: "‖", rVert: "‖", langle: "⟨", rangle: "⟩", log: "log", max: "max", min: "min", gcd: "gcd", bmod: "mod" };
  const RAISED = { "-": "⁻", "⊤": "ᵀ", ...[..."⁰¹²³⁴⁵⁶⁷⁸⁹"] };
  const grouped = (part) => (/^[\w.Ψ]+$/.test(part) ? part : `(${part})`);
  const raised = (part) => ([...part].every((one) => RAISED[one]) ? [...part].map((one) => RAISED[one]).join("") : `^${grouped(part)}`);
  return (tex) =>
    tex.replace(/^\\\(|\\\)$/g, "")
      .replace(/\\[,; ]/g, " ")
      .replace(/\\(?:text|mathrm)\{([^{}]*)\}/g, "$1")
      .replace(/\\hat *(\w)/g, "$1\u0302")
      .replace(/\\([a-zA-Z]+)/g, (whole, name) => SYMBOLS[name] ?? whole)
      .replace(/\\frac\{([^{}]*)\}\{([^{}]*)\}/g, (_, above, below) => ` ${grouped(above)}/${grouped(below)} `)
      .replace(/\\sqrt *(?:\{([^{}]*)\}|(\w))/g, (_, many, one) => `√${grouped(many ?? one)}`)
      .replace(/\^(?:\{([^{}]*)\}|(.))/g, (_, many, one) => raised(many ?? one))
      .replace(/_(\d)/g, (_, digit) => String.fromCodePoint(0x2080 + Number(digit)))
      .replace(/\\&/g, "&")
      .replace(/[{}]/g, "")
      .replace(/-/g, "−")
      .replace(/\s+/g, " ").trim();
})();
