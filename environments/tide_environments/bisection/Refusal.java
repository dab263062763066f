/** Thrown where a call is refused: carries the answer. */
class Refusal extends RuntimeException {
    private static final long serialVersionUID = 1;

    final transient Answer answer;

    Refusal(Answer answer) {
        super(String.valueOf(answer.body.get("detail")), null, false, false);
        this.answer = answer;
    }
}
