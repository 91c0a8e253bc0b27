// A chapter on paper, where nothing can be opened: its answers stand at its end, as in a textbook, and "Going deeper"
// begins a sheet of its own behind them. After printing all is back in its place.
(() => {
  const undo = [];
  const make = (tag, name, ...parts) => {
    const made = document.createElement(tag);
    made.className = name;
    made.append(...parts);
    return made;
  };
  const set = (element, name, value) => {
    element.setAttribute(name, value);
    undo.push(() => element.removeAttribute(name));
  };
  const move = (node, to) => {
    const place = document.createComment("");
    node.replaceWith(place);
    to.append(node);
    undo.push(() => place.replaceWith(node));
  };
  // What a fold hides, without its line.
  const hidden = (fold) => [...fold.childNodes].filter((node) => node.nodeName !== "SUMMARY");
  // "Quiz 3": the heading above a question, and the bold number that the question begins with.
  const named = (element) => {
    const heading = element.closest("section").querySelector("h1, h2, h3").textContent.replace(/#$/, "");
    let before = element;
    while (before && !/^\d/.test(before.querySelector("strong")?.textContent ?? "")) before = before.previousElementSibling;
    return `${heading} ${parseInt(before?.querySelector("strong").textContent) || ""}`.trim();
  };

  const letterOf = (i) => String.fromCharCode(97 + i);
  // A guess on a picture, whose options are buttons: the picture stays at its question, and how it goes on is here.
  function answerGuess(box, name) {
    const { options, right, shown } = JSON.parse(box.querySelector(":scope > script").textContent);
    set(box.querySelector(".guess"), "data-name", name);
    box.querySelectorAll(".guess button").forEach((button, i) => i < options.length && set(button, "data-letter", letterOf(i)));
    const said = options.map(([, why], i) => make("span", "", make("b", i === right ? "ok" : "", letterOf(i) + (i === right ? " ✓" : "")), ` ${why} `));
    const answer = [make("p", "", make("strong", "", name), " ", ...said)];
    const player = box.querySelector(".pbh-player");
    if (player) {
      const show = (beat) => player.dispatchEvent(new CustomEvent("pbh-go", { detail: beat }));
      show(shown);
      answer.push(make("figure", "pbh-player", ...[...player.querySelectorAll(":scope > svg")].map((drawing) => drawing.cloneNode(true))));
      show(0);
    }
    return answer;
  }

  function gather(article) {
    const sentences = make("div", "sentences"), programs = make("div", "programs");
    let guesses = 0, options = [];
    for (const option of article.querySelectorAll("details.option, .pbh-guess.pbh-live")) {
      if (option.matches(".pbh-guess")) {
        sentences.append(...answerGuess(option, `Guess ${++guesses}`));
        continue;
      }
      const first = !option.previousElementSibling?.matches(".option");
      if (first) {
        const row = option.closest(".guess"), name = row ? `Guess ${++guesses}` : named(option.previousElementSibling);
        if (row) set(row, "data-name", name);
        sentences.append(make("p", "", make("strong", "", name)));
        options = [];
      }
      options.push(option);
      const letter = letterOf(options.length - 1), right = option.matches(".right");
      set(option.querySelector("summary"), "data-letter", letter);
      const answer = make("span", "", make("b", right ? "ok" : "", right ? `${letter} ✓` : letter), " ");
      for (const node of hidden(option)) move(node, answer);
      sentences.lastElementChild.append(" ", answer);
    }
    for (const fold of article.querySelectorAll(".tag_hide-cell details.hide")) {
      if (fold.closest(".programs")) continue; // a part of the answer before it
      const answer = make("div", "", make("p", "", make("strong", "", named(fold.closest(".cell")))));
      for (const node of hidden(fold)) move(node, answer);
      programs.append(answer);
    }
    return [sentences, programs].filter((part) => part.childElementCount);
  }

  function lay() {
    restore();
    const article = document.querySelector("article.bd-article"), end = article.querySelector("section");
    const answers = gather(article);
    if (!answers.length) return;
    const section = make("section", "answers", make("h2", "", "Answers"), ...answers);
    end.append(section);
    undo.push(() => section.remove());
    for (const fold of article.querySelectorAll("details.deeper")) move(fold.parentElement, end);
  }
  function restore() {
    while (undo.length) undo.pop()();
  }
  addEventListener("beforeprint", lay);
  addEventListener("afterprint", restore);
})();
