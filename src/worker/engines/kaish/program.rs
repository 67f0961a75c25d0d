//! Analysis of a program before it runs: command names, function definitions with source text,
//! redirects.
//!
//! kaish can neither list its functions nor return their text. So the text is cut from the program
//! by the lexer's spans, and accepted only if it parses to exactly that definition.

use kaish_kernel::ast::{
    Arg, Command, Expr, ListElem, Pipeline, PipelineStage, Program, RecordKey, Redirect, RedirectKind, Stmt,
    StringPart, TestExpr, ToolDef, Value as Kv,
};
use kaish_kernel::lexer::{Token, tokenize};
use kaish_kernel::{KernelError, parser};

/// A function definition in a program.
#[derive(Debug, Clone, PartialEq)]
pub struct Definition {
    /// The definition as kaish parsed it.
    pub def: ToolDef,
    /// Runs whenever the program runs to its end: not inside a branch, loop or other function.
    pub unconditional: bool,
    /// Only definitions precede it: it ran even if the program failed.
    pub leading: bool,
}

/// The result of the analysis.
#[derive(Debug, Default)]
pub struct Found {
    /// Every name in command position, and every literal word that a builtin may run as a command.
    pub commands: Vec<String>,
    /// Function definitions in source order.
    pub definitions: Vec<Definition>,
    /// Whether it reads other programs: `source`, `.`.
    pub sources: bool,
    /// Whether it redirects standard error to standard output (`2>&1`).
    pub merges_stderr: bool,
    /// Whether it redirects standard error elsewhere.
    pub redirects_stderr: bool,
    conditions: usize,
    acted: bool,
}

/// Analyses a program.
pub fn walk(program: &Program) -> Found {
    let mut found = Found::default();
    found.stmts(&program.statements);
    found
}

/// The command of a program that is a single command: a name and words of plain characters. Such a
/// program contains nothing else to find and need not be parsed twice.
pub fn plain_command(code: &str) -> Option<&str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b" _./:,@%+-".contains(&byte);
    let name = code.split(' ').next()?;
    let first = name.bytes().next()?;
    let known = first.is_ascii_lowercase() && !RUNNERS.contains(&name) && name != "source";
    (known && code.bytes().all(plain)).then_some(name)
}

/// Builtins with words that name a command to run.
const RUNNERS: [&str; 7] = ["timeout", "env", "exec", "spawn", "command", "xargs", "alias"];

impl Found {
    fn stmts(&mut self, stmts: &[Stmt]) {
        for stmt in stmts {
            self.stmt(stmt);
        }
    }

    fn inside(&mut self, walk: impl FnOnce(&mut Self)) {
        self.conditions += 1;
        walk(self);
        self.conditions -= 1;
    }

    fn stmt(&mut self, stmt: &Stmt) {
        self.acted |= self.conditions == 0 && !matches!(stmt, Stmt::ToolDef(_) | Stmt::Empty);
        match stmt {
            Stmt::Assignment(assignment) => self.expr(&assignment.value),
            Stmt::Command(command) => self.command(command),
            Stmt::Pipeline(pipeline) => self.pipeline(pipeline),
            Stmt::If(branch) => {
                self.expr(&branch.condition);
                self.inside(|found| {
                    found.stmts(&branch.then_branch);
                    found.stmts(branch.else_branch.as_deref().unwrap_or_default());
                });
            }
            Stmt::For(each) => {
                each.items.iter().for_each(|item| self.expr(item));
                self.inside(|found| found.stmts(&each.body));
            }
            Stmt::While(each) => {
                self.expr(&each.condition);
                self.inside(|found| found.stmts(&each.body));
            }
            Stmt::Case(case) => {
                self.expr(&case.expr);
                self.inside(|found| case.branches.iter().for_each(|branch| found.stmts(&branch.body)));
            }
            Stmt::Group(stmts) => self.stmts(stmts),
            Stmt::Redirected { body, redirects } => {
                self.redirects(redirects);
                self.stmt(body);
            }
            Stmt::Return(value) | Stmt::Exit(value) => {
                if let Some(value) = value {
                    self.expr(value);
                }
            }
            Stmt::ToolDef(def) => {
                let unconditional = self.conditions == 0;
                self.definitions.push(Definition {
                    def: def.clone(),
                    unconditional,
                    leading: unconditional && !self.acted,
                });
                self.inside(|found| found.stmts(&def.body));
            }
            Stmt::Test(test) => self.test(test),
            Stmt::AndChain { left, right } | Stmt::OrChain { left, right } => {
                self.stmt(left);
                self.inside(|found| found.stmt(right));
            }
            Stmt::EnvScoped { assignments, body } => {
                assignments.iter().for_each(|assignment| self.expr(&assignment.value));
                self.stmt(body);
            }
            Stmt::Not(body) => self.stmt(body),
            // kaish may add kinds of `Stmt`; an unknown one only loses the fast path for its
            // content.
            _ => {}
        }
    }

    fn pipeline(&mut self, pipeline: &Pipeline) {
        for stage in &pipeline.stages {
            match stage {
                PipelineStage::Command(command) => self.command(command),
                PipelineStage::Compound(stmt) => self.inside(|found| found.stmt(stmt)),
                _ => {}
            }
        }
    }

    fn command(&mut self, command: &Command) {
        self.sources |= matches!(command.name.as_str(), "source" | ".");
        self.commands.push(command.name.clone());
        let runner = RUNNERS.contains(&command.name.as_str());
        for arg in &command.args {
            match arg {
                Arg::Positional(expr) => {
                    if let (true, Expr::Literal(Kv::String(word))) = (runner, expr) {
                        self.commands.push(word.clone());
                    }
                    self.expr(expr);
                }
                Arg::WordAssign { value, .. } => {
                    // `alias ll='ls -la'`: the first word of the alias is a later command.
                    if let (true, Expr::Literal(Kv::String(text))) = (runner, value)
                        && let Some(word) = text.split_whitespace().next()
                    {
                        self.commands.push(word.to_owned());
                    }
                    self.expr(value);
                }
                Arg::Named { value, .. } | Arg::ShortNamed { value, .. } => self.expr(value),
                _ => {}
            }
        }
        self.redirects(&command.redirects);
    }

    fn redirects(&mut self, redirects: &[Redirect]) {
        for redirect in redirects {
            match &redirect.kind {
                RedirectKind::MergeStderr => self.merges_stderr = true,
                RedirectKind::Stderr | RedirectKind::Both | RedirectKind::MergeStdout => self.redirects_stderr = true,
                _ => {}
            }
            self.expr(&redirect.target);
        }
    }

    fn parts(&mut self, parts: &[StringPart]) {
        for part in parts {
            match part {
                StringPart::CommandSubst(stmts) => self.inside(|found| found.stmts(stmts)),
                StringPart::VarWithDefault { default, .. } => self.parts(default),
                _ => {}
            }
        }
    }

    fn expr(&mut self, expr: &Expr) {
        match expr {
            Expr::Interpolated(parts) | Expr::VarWithDefault { default: parts, .. } => self.parts(parts),
            Expr::HereDocBody { parts, .. } => {
                parts.iter().for_each(|spanned| self.parts(std::slice::from_ref(&spanned.part)));
            }
            Expr::Not(inner) => self.expr(inner),
            Expr::BinaryOp { left, right, .. } => {
                self.expr(left);
                self.expr(right);
            }
            Expr::CommandSubst(stmts) => self.inside(|found| found.stmts(stmts)),
            Expr::Test(test) => self.test(test),
            Expr::Command(command) => self.command(command),
            Expr::ListLiteral(items) => {
                for item in items {
                    match item {
                        ListElem::Item(expr) | ListElem::Spread(expr) => self.expr(expr),
                        _ => {}
                    }
                }
            }
            Expr::RecordLiteral(entries) => {
                for entry in entries {
                    if let RecordKey::Interpolated(parts) = &entry.key {
                        self.parts(parts);
                    }
                    self.expr(&entry.value);
                }
            }
            _ => {}
        }
    }

    fn test(&mut self, test: &TestExpr) {
        match test {
            TestExpr::FileTest { path, .. } => self.expr(path),
            TestExpr::StringTest { value, .. } => self.expr(value),
            TestExpr::Comparison { left, right, .. } => {
                self.expr(left);
                self.expr(right);
            }
            TestExpr::And { left, right } | TestExpr::Or { left, right } => {
                self.test(left);
                self.test(right);
            }
            TestExpr::Not { expr } => self.test(expr),
            TestExpr::In { left, right } | TestExpr::NotIn { left, right } => {
                self.expr(left);
                self.expr(right);
            }
            _ => {}
        }
    }
}

/// Limit of candidate ends per definition; beyond it the text is unknown.
const ENDS_TRIED: usize = 256;

/// The source text of `def` in `source`; `None` if no slice is exactly that definition.
pub fn text_of(source: &str, def: &ToolDef) -> Option<String> {
    let tokens = tokenize(source).ok()?;
    let mut tried = 0;
    for (at, spanned) in tokens.iter().enumerate() {
        if source.get(spanned.span.start..spanned.span.end) != Some(def.name.as_str()) {
            continue;
        }
        // `name() {…}` starts at the name, `function name {…}` at the word before it.
        let starts = [Some(at), at.checked_sub(1)];
        for start in starts.into_iter().flatten() {
            let from = tokens[start].span.start;
            let mut depth = 0usize;
            for end in &tokens[at..] {
                match end.token {
                    Token::LBrace => depth += 1,
                    Token::RBrace => {
                        depth = depth.saturating_sub(1);
                        if depth > 0 {
                            continue;
                        }
                        tried += 1;
                        if tried > ENDS_TRIED {
                            return None;
                        }
                        let slice = source.get(from..end.span.end)?;
                        if single_definition(slice).as_ref() == Some(def) {
                            return Some(slice.to_owned());
                        }
                    }
                    _ => {}
                }
            }
        }
    }
    None
}

/// The definition in `text`, if it is exactly one.
pub fn single_definition(text: &str) -> Option<ToolDef> {
    let program = parser::parse(text).ok()?;
    let mut statements = program.statements.into_iter().filter(|stmt| !matches!(stmt, Stmt::Empty));
    match (statements.next(), statements.next()) {
        (Some(Stmt::ToolDef(def)), None) => Some(def),
        _ => None,
    }
}

/// Whether a text is a complete program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completeness {
    /// It parses.
    Complete,
    /// More text may make it parse.
    Incomplete,
    /// No more text will.
    Invalid,
}

/// Whether `source` is a complete program.
pub fn completeness(source: &str) -> Completeness {
    let Err(errors) = parser::parse(source) else {
        return Completeness::Complete;
    };
    if let Err(lexical) = tokenize(source) {
        use kaish_kernel::lexer::LexerError as E;
        let open = lexical.iter().any(|error| {
            matches!(
                error.token,
                E::UnterminatedString
                    | E::UnterminatedVarRef
                    | E::UnterminatedCommandSubst
                    | E::UnterminatedArithmetic
                    | E::UnterminatedHeredoc { .. }
                    | E::TrailingBackslash
            )
        });
        // To the lexer an open single quote is only an unexpected character.
        let open = open || tokenize(&format!("{source}'")).is_ok();
        return if open { Completeness::Incomplete } else { Completeness::Invalid };
    }
    let wants_more = errors.iter().any(|error| error.message.starts_with("found end of input"));
    let open = open_brackets(source);
    let at_open = errors.iter().any(|error| open.contains(&error.span.start));
    if wants_more || at_open { Completeness::Incomplete } else { Completeness::Invalid }
}

/// A line below the error of code that does not parse.
pub fn hint(error: &KernelError) -> &'static str {
    match error {
        KernelError::Parse { .. } => "hint: kaish is not bash; bash code runs in a kernel with --engine bash\n",
        _ => "",
    }
}

/// Where unclosed brackets start; the parser reports errors there, not at the end.
fn open_brackets(source: &str) -> Vec<usize> {
    let mut open = Vec::new();
    for spanned in tokenize(source).unwrap_or_default() {
        match spanned.token {
            Token::LBrace | Token::LBracket | Token::LParen | Token::CmdSubstStart => open.push(spanned.span.start),
            Token::RBrace | Token::RBracket | Token::RParen => drop(open.pop()),
            _ => {}
        }
    }
    open
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str) -> Found {
        walk(&parser::parse(source).expect("the table holds valid programs"))
    }

    #[test]
    fn command_names_are_collected() {
        let found = found(
            "a1 | a2 && a3 || a4\nif a5; then a6; else a7; fi\nfor i in $(a8); do a9; done\nwhile b1; do b2; done\n\
             case x in y) b3 ;; esac\nf() { b4; }\nx=\"$(b5)\"\n! b6\ntimeout 5 b7 -x\nFOO=1 b8\n{ b9; } > out\nc1 &",
        );
        for name in [
            "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8", "b9",
            "c1",
        ] {
            assert!(found.commands.iter().any(|command| command == name), "{name} of {:?}", found.commands);
        }
    }

    #[test]
    fn function_text_is_kept_as_written() {
        for (source, text) in [
            ("f() { echo hi; }", "f() { echo hi; }"),
            ("x=1; f() { # why\n  echo \"a } b\" ${x}\n}; f", "f() { # why\n  echo \"a } b\" ${x}\n}"),
            ("function g {\n echo {1: 2}\n}", "function g {\n echo {1: 2}\n}"),
            ("f\nf() { if true; then { echo x; }; fi; }", "f() { if true; then { echo x; }; fi; }"),
        ] {
            let found = found(source);
            let def = &found.definitions.first().expect("defines one").def;
            assert_eq!(text_of(source, def).as_deref(), Some(text), "{source}");
        }
    }

    #[test]
    fn conditional_functions_flagged() {
        let found = found("f() { true; }\nif true; then g() { true; }; fi\ntrue && h() { true; }");
        let flags: Vec<_> = found.definitions.iter().map(|d| (d.def.name.as_str(), d.unconditional)).collect();
        assert_eq!(flags, [("f", true), ("g", false), ("h", false)]);
    }

    #[test]
    fn stderr_redirects_are_classified() {
        assert!(found("a 2>&1").merges_stderr);
        assert!(!found("a 2>&1").redirects_stderr);
        assert!(found("a 2> f").redirects_stderr);
        assert!(found("a &> f").redirects_stderr);
    }

    #[test]
    fn completeness_of_programs() {
        use Completeness::{Complete, Incomplete, Invalid};
        for (source, expected) in [
            ("", Complete),
            ("echo hi", Complete),
            ("x=1\n", Complete),
            ("for i in 1 2; do echo $i; done", Complete),
            ("if true; then", Incomplete),
            ("if true", Incomplete),
            ("for i in 1 2; do", Incomplete),
            ("while true; do echo x", Incomplete),
            ("f() {", Incomplete),
            ("f() {\n  echo hi", Incomplete),
            ("echo \"open", Incomplete),
            ("echo 'open", Incomplete),
            ("echo $(ls", Incomplete),
            ("x=[1 2", Incomplete),
            ("x={a: 1", Incomplete),
            ("cat <<EOF\nline", Incomplete),
            ("echo a |", Incomplete),
            ("true &&", Incomplete),
            ("fi", Invalid),
            ("done; done", Invalid),
            ("echo )", Invalid),
        ] {
            assert_eq!(completeness(source), expected, "{source:?}");
        }
    }
}
