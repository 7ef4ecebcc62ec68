//! The language of the case files: see `README.md` beside this file.

/// One case, its matrix already expanded: a sequence of calls with the answers that are expected.
pub struct Case {
    /// The file's name without its ending.
    pub theme: String,
    /// The case's name, with the values of its matrix.
    pub name: String,
    /// Runs in a process of its own, because it loses the context.
    pub isolated: bool,
    /// The expectation is CUDA's documentation, not a measurement.
    pub documented: bool,
    /// Not for a GPU: the real driver crashes.
    pub soft: bool,
    pub steps: Vec<Step>,
}

/// One line of a case.
#[derive(Clone)]
pub struct Step {
    pub line: usize,
    /// The thread that calls: 0 unless the line begins with `@tN`.
    pub thread: usize,
    /// Repeated until the answer is the expected one.
    pub eventually: bool,
    /// The line as it is reported, values of the matrix put in.
    pub text: String,
    pub words: Vec<String>,
    /// The words that the answer has to begin with.
    pub expect: Option<Vec<String>>,
}

impl Case {
    /// How the case is named in reports, and selected.
    pub fn title(&self) -> String {
        format!("{}/{}", self.theme, self.name)
    }
}

/// The cases of one file. Errors name the line.
pub fn parse(theme: &str, text: &str) -> Result<Vec<Case>, String> {
    let mut cases = Vec::new();
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, clean(line))).peekable();
    while let Some((number, line)) = lines.next() {
        if line.is_empty() {
            continue;
        }
        let Some(header) = line.strip_prefix("case ") else {
            return Err(format!("{theme}.txt:{number}: expected `case`, found {line:?}"));
        };
        let mut header = header.to_owned();
        // A matrix may begin on the next line and go on over several, and what is said of the case may follow on its own.
        let open = |header: &str| header.matches('[').count() > header.matches(']').count();
        while let Some((_, more)) =
            lines.next_if(|(_, line)| open(&header) || header.ends_with(',') || line.starts_with('['))
        {
            header.push(' ');
            header.push_str(&more);
        }
        let mut body = Vec::new();
        while let Some((number, line)) = lines.next_if(|(_, line)| !line.starts_with("case ")) {
            if !line.is_empty() {
                body.push((number, line));
            }
        }
        let header = Header::parse(&header).map_err(|error| format!("{theme}.txt:{number}: {error}"))?;
        for values in header.rows() {
            let mut steps = Vec::new();
            for (number, line) in &body {
                let line = substitute(line, &values).map_err(|error| format!("{theme}.txt:{number}: {error}"))?;
                steps.push(step(*number, &line).map_err(|error| format!("{theme}.txt:{number}: {error}"))?);
            }
            let shown: Vec<&str> = values.iter().map(|(_, value)| value.as_str()).collect();
            let name =
                if shown.is_empty() { header.name.clone() } else { format!("{} [{}]", header.name, shown.join(" | ")) };
            cases.push(Case {
                theme: theme.to_owned(),
                name,
                isolated: header.isolated,
                documented: header.documented,
                soft: header.soft,
                steps,
            });
        }
    }
    Ok(cases)
}

/// A line without its comment and without the space around it.
fn clean(line: &str) -> String {
    let line = line.split_once(" #").map_or(line, |(before, _)| before).trim();
    if line.starts_with('#') { String::new() } else { line.to_owned() }
}

/// The values of one row of a matrix, by name.
type Row = Vec<(String, String)>;

struct Header {
    name: String,
    isolated: bool,
    documented: bool,
    soft: bool,
    matrices: Vec<Vec<Row>>,
}

impl Header {
    fn parse(header: &str) -> Result<Header, String> {
        let mut rest = header.trim();
        let (mut isolated, mut documented, mut soft) = (false, false, false);
        loop {
            let (before, mark) = rest.rsplit_once(' ').unwrap_or_default();
            match mark {
                "isolated" => isolated = true,
                "documented" => documented = true,
                "soft" => soft = true,
                _ => break,
            }
            rest = before.trim_end_matches([',', ' ']);
        }
        let mut matrices = Vec::new();
        while let Some(before) = rest.strip_suffix(']') {
            let (before, matrix) = before.rsplit_once('[').ok_or("a ] without its [")?;
            matrices.insert(0, parse_matrix(matrix)?);
            rest = before.trim_end();
        }
        Ok(Header { name: rest.to_owned(), isolated, documented, soft, matrices })
    }

    /// Every combination of the rows of the matrices.
    fn rows(&self) -> Vec<Row> {
        let mut all = vec![Row::new()];
        for matrix in &self.matrices {
            all = all.iter().flat_map(|row| matrix.iter().map(|more| [row.clone(), more.clone()].concat())).collect();
        }
        all
    }
}

/// `a b c`: values of `$mode`. `x y: 1 2, 3 4`: rows of `$x` and `$y`; the last name takes the rest of its row.
fn parse_matrix(text: &str) -> Result<Vec<Row>, String> {
    let Some((names, rows)) = text.split_once(':') else {
        return Ok(text.split_whitespace().map(|value| vec![("mode".to_owned(), value.to_owned())]).collect());
    };
    let names: Vec<&str> = names.split_whitespace().collect();
    let row = |row: &str| {
        let words: Vec<&str> = row.split_whitespace().collect();
        if words.len() < names.len() {
            return Err(format!("the row {row:?} has fewer values than {names:?}"));
        }
        let (first, last) = words.split_at(names.len() - 1);
        let values = first.iter().map(|&word| word.to_owned()).chain([last.join(" ")]);
        Ok(names.iter().map(|&name| name.to_owned()).zip(values).collect())
    };
    rows.split(',').filter(|row| !row.trim().is_empty()).map(row).collect()
}

fn substitute(line: &str, values: &Row) -> Result<String, String> {
    let mut parts = line.split('$');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(part.len());
        let (name, rest) = part.split_at(end);
        let value = values.iter().find(|(known, _)| known == name).ok_or_else(|| format!("${name} has no value"))?;
        text.push_str(&value.1);
        text.push_str(rest);
    }
    Ok(text)
}

fn step(line: usize, text: &str) -> Result<Step, String> {
    let (call, expect) = match text.split_once("->") {
        Some((call, expect)) => (call, Some(expect.split_whitespace().map(str::to_owned).collect())),
        None => (text, None),
    };
    let mut words: Vec<String> = call.split_whitespace().map(str::to_owned).collect();
    let shown = words.join(" ");
    let mut thread = 0;
    if let Some(name) = words.first().and_then(|word| word.strip_prefix('@')) {
        thread = thread_number(name)?;
        words.remove(0);
    }
    let eventually = words.first().is_some_and(|word| word == "eventually");
    if eventually {
        words.remove(0);
    }
    if words.is_empty() {
        return Err("no call".into());
    }
    Ok(Step { line, thread, eventually, text: shown, words, expect })
}

/// The number of a thread's name, `t0` to `t9`.
pub fn thread_number(name: &str) -> Result<usize, String> {
    let number = name.strip_prefix('t').and_then(|number| number.parse().ok()).filter(|&number| number < 10);
    number.ok_or_else(|| format!("{name:?} is not a thread's name (t0 to t9)"))
}

/// Whether the answer begins with the expected words. `_` is any word, `a|b` is either.
pub fn matches(answer: &str, expect: &[String]) -> bool {
    let mut words = answer.split_whitespace();
    expect.iter().all(|expected| {
        words.next().is_some_and(|word| expected == "_" || expected.split('|').any(|choice| choice == word))
    })
}
