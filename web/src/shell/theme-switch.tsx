import { chooseTheme, useThemeChoice, type Choice } from "../ui/theme";

const NEXT: Record<Choice, Choice> = { system: "light", light: "dark", dark: "system" };
const WORDS: Record<Choice, string> = { system: "Auto", light: "Light", dark: "Dark" };

export function ThemeSwitch() {
  const choice = useThemeChoice();
  return (
    <button type="button" className="hover:text-ink" aria-label={`Colours: ${WORDS[choice]}. Change to ${WORDS[NEXT[choice]]}`}
      title="Light, dark, or as the system" onClick={() => chooseTheme(NEXT[choice])}>
      <span aria-hidden="true">◐ {WORDS[choice]}</span>
    </button>
  );
}
