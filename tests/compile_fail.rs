//! The rules that the compiler keeps: each program in `ui/` breaks one, and must not compile.

#[test]
fn programs_that_break_a_rule_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
